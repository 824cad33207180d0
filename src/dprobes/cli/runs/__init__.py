"""The run of a program: how its line is read, what was kept of the last one, and what follows it."""
