"""eBPF instructions: their table, their bytes, an assembler and a disassembler."""
