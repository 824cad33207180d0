"""
ELF files: headers, symbols, unwind tables, and the debug files beside them.

No library is used. Symbol tables are searched as bytes, because an object for each of a library's 10 000 symbols takes
longer than the rest of a run. Tests compare the results with those of pyelftools.
"""
