"""
Translation of RPN to eBPF: the instruction set, an assembler, and the lowering of handlers.

The package makes no system call. The kernel runs the code, a PPDF contains it, and the inline engine translates it to
machine code.
"""
