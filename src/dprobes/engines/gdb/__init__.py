"""
The gdb engine: machines, processes and systems behind a stub that speaks the GDB remote serial protocol.

The protocol's part is bytes in and data out; connections, questions and their answers, registers and steps are objects
of their own, and the session is the run. Whether a stub stands for a machine is known once there is a connection: so
the engine makes that before it makes the session. Several runs share one stub as its members. A stub's peculiarities
are described where they are worked around; those of a processor are in the tables of ``arch``, and in ``target.code``:
lengths of instructions, and where branches lead. A restorer outlives us with the connection, for the case that we are
killed.
"""
