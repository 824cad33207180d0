"""Typers, which resolve the names and types of the syntax tree, report errors, and return the typed tree."""
