"""From the typed tree to RPN source, and the minor codes and templates of its records."""
