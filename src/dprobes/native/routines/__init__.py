"""
Helpers of the kernel that handlers call, as routines in eBPF: so each processor gets them by translation.

What a routine needs of the processor itself (the clock, faults, system calls) is written for that (``native.x86``).
"""
