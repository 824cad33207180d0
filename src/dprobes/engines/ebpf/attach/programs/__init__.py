"""Programs of the engine's own that follow threads, processes and the modules that they map, and what they stand on."""
