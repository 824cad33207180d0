"""
CTF 1.8 traces: the Common Trace Format, which babeltrace2 and Trace Compass read (``docs/ctf.md``).

``ctf_metadata`` encodes records and describes them in TSDL; ``ctf_target`` is the log target. The writer is our own:
babeltrace2's needs a C library, and makes a trace that is complete only when it is closed; ours can be read at any
moment, and after a ``kill -9``.
"""
