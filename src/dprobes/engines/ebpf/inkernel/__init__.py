"""Probepoints in modules of the kernel, whether they are loaded or not."""
