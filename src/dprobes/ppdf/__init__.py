"""
The PPDF: a compiled probe program as a file, with all that a machine without its sources and symbols needs.

``docs/ppdf.md`` draws the bytes. Those of others are hostile until proven otherwise: whatever ``reader`` is given, it
returns a ``Ppdf`` or raises ``FormatError``. Knows nothing of processes and engines.
"""
