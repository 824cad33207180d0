"""
Translation of eBPF to machine code: of the same bytecode that the kernel loads, for handlers in the probed process.

Pure: instructions and addresses in, bytes out. Nothing here maps memory or accesses a process.
"""
