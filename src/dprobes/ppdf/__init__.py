"""
The PPDF: a compiled probe program as a file, with all that a machine without its sources and symbols needs.

``docs/ppdf.md`` draws the bytes. Those of others are hostile until proven otherwise: whatever ``decode`` is given, it
returns a ``Ppdf`` or raises ``FormatError``. Knows nothing of processes and engines.
"""

from __future__ import annotations

from dprobes.ppdf.model import EbpfCode, EbpfMap, Ppdf
from dprobes.ppdf.reader import decode
from dprobes.ppdf.writer import encode

__all__ = ["EbpfCode", "EbpfMap", "Ppdf", "decode", "encode"]
