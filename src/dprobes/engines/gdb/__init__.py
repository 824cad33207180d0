"""
The gdb engine: machines, processes and systems behind a stub that speaks the GDB remote serial protocol.

``remote_protocol`` turns bytes into messages and back. Connections, requests and their replies, registers and steps are
separate classes, and the session is the run. A connection shows whether a stub is for a machine, so the engine connects
before it creates the session. Several runs share one stub as its members. Peculiarities of stubs are described where
they are worked around. Those of processors are in the tables of ``arch``, and in ``target.code``: lengths of
instructions, and targets of branches. If the engine is killed, a restorer process takes over the connection.
"""
