"""
The gdb engine: machines, processes and systems behind a stub that speaks the GDB remote serial protocol.

``remote_protocol`` parses and builds packets. Connections, requests and their replies, registers and steps are separate
classes. Only a connected stub shows whether its target is a machine, so the engine connects before it creates the
session. Several sessions share one stub as its members. Workarounds for single stubs are described in place. Processors
are described by the tables of ``arch``, and by ``target.code``: lengths of instructions, and targets of branches. If
this process is killed, a restorer process takes over the connection.
"""
