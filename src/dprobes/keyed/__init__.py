"""
Keyed tables: entries in memory, and what they say.

``rpn.keyed_tables`` has what a program declares; interpreter, engines and outputs share what is here.
"""
