"""Hits of engines that run handlers in Python: the handlers' results, counts, and the order of records."""
