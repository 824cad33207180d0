"""From what is meant to RPN source, and the numbers and templates of its records."""
