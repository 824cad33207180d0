"""
Targets of probes: executables, shared libraries, processes and kernels, with their symbols, mappings and instructions.

No module here needs privileges or changes a process. The package itself imports nothing, so that the tracer process can
import ``dprobes.target.process_maps`` without the ELF and decoder libraries. Import the module that you need.
"""

from __future__ import annotations
