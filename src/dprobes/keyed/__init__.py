"""
Keyed tables: their entries in memory, and the output of their contents.

``rpn.keyed_tables`` has the declarations in programs. Interpreter, engines and outputs share this package.
"""
