"""
ELF files: headers, symbols, unwind tables, and separate debug files.

No library is used. Symbol tables are searched as bytes, because creating an object for each of a library's 10 000
symbols would take longer than the rest of a run. Tests compare the results with those of pyelftools.
"""
