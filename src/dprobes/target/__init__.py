"""
Targets of probes: executables, shared libraries, processes and kernels, with their symbols, mappings and instructions.

Nothing here needs privileges or changes a process. The package itself imports nothing, so that the tracer process can
import ``dprobes.target.process_maps`` without loading the ELF and decoder libraries; import the module that you need.
"""

from __future__ import annotations
