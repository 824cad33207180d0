"""Debug information (DWARF 4 and 5), which is read when a program is built, and never at a hit."""
