"""What handlers ask of the kernel, for each kind of place that a handler can stand at."""
