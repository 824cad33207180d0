"""
CTF 1.8 traces: the Common Trace Format, which babeltrace2 and Trace Compass read (docs/ctf.md).

``ctf_metadata`` encodes records and describes them in TSDL; ``ctf_target`` is the log target.
"""
