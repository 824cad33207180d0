"""Syntax of programs: tokens, the parsers, and the tree, in which names and types have no meaning yet."""
