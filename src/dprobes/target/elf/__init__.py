"""
ELF files: headers, symbols, unwind tables, and the debug files beside them.

The readers are our own. Symbol tables are searched as bytes, because an object for each of a library's 10 000 symbols
takes longer than the rest of a run. Of the unwind table a single column is needed. Tests compare the readers with
pyelftools.
"""
