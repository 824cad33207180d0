"""Filters: conditions about hits and records. ``parser`` has their language, ``handlerfilter`` makes code of them."""
