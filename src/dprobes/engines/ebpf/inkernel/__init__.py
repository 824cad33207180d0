"""Probepoints in the kernel and in kernel modules, whether these are loaded or not."""
