"""Machine code for x86-64."""
