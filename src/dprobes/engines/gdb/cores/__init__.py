"""Core files of processes behind stubs."""
