"""
CTF 1.8 traces: the Common Trace Format, which babeltrace2 and Trace Compass read (docs/ctf.md).

``classes.py`` makes bytes of records, and says in TSDL what they are; ``metadata.py`` is the rest of that text.
``packets.py`` holds the layout of packets and the files that they are in; ``trace.py`` is one trace, and ``sink.py``
the log target, which begins traces.
"""
