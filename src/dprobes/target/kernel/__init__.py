"""The running kernel as something to probe: its symbols, its text, its modules, and what nobody may probe in it."""
