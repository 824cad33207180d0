"""The tracer's part of handlers that run in processes: memory, jumps, stops, and cleanup."""
