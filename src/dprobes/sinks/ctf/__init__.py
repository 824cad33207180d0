"""
CTF 1.8 traces: the Common Trace Format, which babeltrace2 and Trace Compass read (``docs/reference/ctf.md``).

``ctf_metadata`` encodes records and describes them in TSDL; ``ctf_target`` is the log target. DProbes has its own
writer, because babeltrace2's needs a C library, and its traces are complete only when they are closed. Traces of this
writer are readable at any moment, and after a ``kill -9``.
"""
