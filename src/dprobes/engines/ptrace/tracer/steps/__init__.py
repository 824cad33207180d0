"""The execution of probed instructions, and the calls in which a stop interrupts a thread."""
