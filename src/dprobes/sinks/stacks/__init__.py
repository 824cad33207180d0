"""Profiles of call stacks: the count of each stack, as folded text, a flame graph, or for pprof."""
