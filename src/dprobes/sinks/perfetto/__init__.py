"""
Perfetto traces: a file of protobuf messages for ui.perfetto.dev and trace_processor (``docs/perfetto.md``).

``perfetto_messages`` writes the messages of protobuf, and ``perfetto_target`` is the log target. The few messages that
are needed are written faster than with protobuf's classes, and without another package; tests read them with those.
"""
