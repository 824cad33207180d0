"""
Perfetto traces: a file of protobuf messages for ui.perfetto.dev and trace_processor (``docs/reference/perfetto.md``).

``perfetto_messages`` writes the messages of protobuf, and ``perfetto_target`` is the log target. Encoding the few
necessary messages directly is faster than protobuf's classes, and needs no other package. Tests decode them with those
classes.
"""
