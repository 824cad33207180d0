"""
Helpers of the kernel that handlers call, as routines in eBPF: each processor gets them by translation.

Routines that need the processor itself (the clock, faults, system calls) are written with ``VirtualAssembler``.
"""
