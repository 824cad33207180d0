"""
ELF files: headers, symbols, unwind tables, and the debug files beside them.

The readers are our own: symbol tables are searched as bytes, because building an object for each of a library's 10 000
symbols takes longer than the rest of a run, and of the unwind table a single column is needed. Tests compare them with
pyelftools.
"""
