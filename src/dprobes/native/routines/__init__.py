"""
Routines in eBPF that replace the kernel's helpers; they are translated for each processor.

Routines that need the processor itself (the clock, faults, system calls) are written with ``VirtualAssembler``.
"""
