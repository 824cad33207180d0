"""Core dumps: the layout of their files, and their writer."""
