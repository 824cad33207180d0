"""Profiles of call stacks: how often each stack was there, as folded text, a flame graph, or for pprof."""
