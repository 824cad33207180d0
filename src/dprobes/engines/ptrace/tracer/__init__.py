"""The tracer process: threads, breakpoints, and the handling of hits."""
