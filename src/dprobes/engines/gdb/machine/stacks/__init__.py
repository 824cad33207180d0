"""Call stacks of machines: those of the kernel, by its own tables, and those of its programs, by files."""
