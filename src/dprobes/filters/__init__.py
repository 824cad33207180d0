"""Filters: conditions about hits and records. ``filter_language`` has their language, ``handler_filter`` their code."""
