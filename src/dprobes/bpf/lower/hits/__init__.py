"""What stands around a handler at a hit: whether it runs, and what becomes of its record."""
