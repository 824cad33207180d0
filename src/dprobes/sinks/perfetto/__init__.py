"""
Perfetto traces: a file of protobuf messages for ui.perfetto.dev and trace_processor (docs/perfetto.md).

``protobuf.py`` writes messages, ``messages.py`` those that a trace consists of. ``annotations.py`` is what a record
says, ``tracks.py`` whose it is, and ``calls.py`` which call a return ends. ``file.py`` is the file, and ``sink.py`` the
log target.
"""
