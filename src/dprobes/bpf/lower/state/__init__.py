"""What a handler keeps while it runs: its state, the RPN stack, and copies of memory."""
