"""The tracer process: threads, breakpoints, and what happens at a hit."""
