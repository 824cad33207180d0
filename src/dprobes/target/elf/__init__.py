"""ELF files: headers, symbols, unwind tables, and the debug files beside them."""
