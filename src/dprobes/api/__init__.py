"""
The Python API: build or compile a probe program, insert it, iterate over its records.

``dprobes`` exports its names; docs/how-to/python.md is the guide. The command line uses these modules, too.
"""

__all__ = ["C_SUFFIX"]

C_SUFFIX = ".dpc"
"""The suffix of files in DProbes C."""
