"""Filters: conditions about hits and records. ``parser`` has their language, ``handler_filter`` makes code of them."""
