"""Machine code of modules: instructions, the ones that may carry a probepoint, and the exits of functions."""
