"""
gdb engine: probes machines, processes and systems through a stub that speaks the GDB remote serial protocol.

``remote_protocol`` parses and builds packets. Connections, requests and their replies, registers and steps are separate
classes. Only a connected stub shows whether its target is a machine, so the engine connects before it creates the
session. Several sessions share one stub as its members. Workarounds for single stubs are described in place. The tables
of ``arch`` describe processors, and ``target.code`` has the lengths of instructions and the targets of branches. If
this process is killed, a restorer process takes over the connection.
"""
