"""
eBPF to machine code: the same bytes that the kernel loads, for handlers that run in the probed process.

Pure: instructions and addresses in, bytes out. Nothing here maps memory or accesses a process.
"""
