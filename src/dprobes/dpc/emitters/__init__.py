"""Emitters of RPN source from the typed tree, with the minor codes and templates of its records."""
