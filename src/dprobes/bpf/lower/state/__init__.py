"""Data of a handler while it runs: its state, the RPN stack, and copies of memory."""
