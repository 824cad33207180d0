"""Machine code of modules: instructions, what may carry a probepoint, and where functions are left."""
