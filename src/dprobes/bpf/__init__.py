"""
RPN to eBPF: the instruction set, an assembler, and the lowering of handlers.

The package makes no system call. The kernel runs the resulting code, a PPDF carries it, and the inline engine
translates the same bytes to machine code.
"""
