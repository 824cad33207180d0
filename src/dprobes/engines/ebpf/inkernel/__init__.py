"""Probepoints in the kernel and in its modules, whether these are loaded or not."""
