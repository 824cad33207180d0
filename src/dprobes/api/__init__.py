"""
Python API: building or compiling a probe program, its insertion, and iteration over its records.

``dprobes`` exports its names; docs/how-to/python.md is the guide. The command line uses these modules, too.
"""

__all__ = ["C_SUFFIX"]

C_SUFFIX = ".dpc"
"""The suffix of files in DProbes C."""
