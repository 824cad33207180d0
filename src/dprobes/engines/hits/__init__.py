"""The life of a hit, whatever engine reports it: handlers, records, and the order of records."""
