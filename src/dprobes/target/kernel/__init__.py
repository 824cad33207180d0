"""The running kernel as a target: its symbols, its code (.text), its modules, and the code where it refuses probes."""
