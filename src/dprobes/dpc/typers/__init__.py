"""From what is written to what is meant: names and types, and the errors of who means what cannot be."""
