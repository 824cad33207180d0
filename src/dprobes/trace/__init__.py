"""Trace files: records with what is needed to show them elsewhere (docs/tracefile.md)."""
