"""Handlers in processes, as the tracer sees to them: memory, jumps, stops, and what is left."""
