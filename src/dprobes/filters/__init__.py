"""Filters: conditions on hits and records. ``filter_language`` parses them, ``handler_filter`` compiles them."""
