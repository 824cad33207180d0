"""Handlers, records, counts and the order of records for hits, independent of the engine that reports them."""
