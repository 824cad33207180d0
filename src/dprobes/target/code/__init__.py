"""Machine code of modules: instructions, possible places of probepoints, and the exits of functions."""
