"""
RPN to eBPF: the instruction set, an assembler, and the lowering of handlers.

Pure: nothing here makes a system call. The kernel runs the resulting code, a PPDF carries it, and the inline engine
translates the same bytes.
"""
