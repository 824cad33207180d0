"""Replay engine: handlers run on hits from a file, without a probed process."""
