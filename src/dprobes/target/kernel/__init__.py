"""The running kernel as a target: its symbols, its text, its modules, and the code where probes are refused."""
