"""Profiles of call stacks: the count of each stack, as folded text, as a flame graph, or for pprof."""
