"""Sinks: where formatted records go. One file each."""
