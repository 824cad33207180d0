"""Code before and after a handler at a hit: it decides whether the handler runs, and emits the record."""
