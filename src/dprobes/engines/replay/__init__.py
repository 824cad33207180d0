"""Replay engine: handlers run on hits that a file describes, instead of those of a process."""
