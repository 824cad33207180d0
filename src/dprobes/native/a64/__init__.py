"""Machine code for AArch64."""
