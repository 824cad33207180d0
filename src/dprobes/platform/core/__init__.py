"""Core files: their layout and their writer."""
