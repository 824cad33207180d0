"""What is written: tokens, the parsers, and the tree of a program before names and types have a meaning."""
