"""The types of C: themselves, how values of each are printed, and where they are passed to functions."""
