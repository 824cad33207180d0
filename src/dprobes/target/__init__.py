"""
What is probed: programs, shared libraries, their symbols, mappings and instructions.

Nothing here needs privileges or changes a process. The package itself imports nothing, so that the tracer process can
take ``dprobes.target.process_maps`` without paying for the ELF and decoder libraries; import the module that you need.
"""

from __future__ import annotations
