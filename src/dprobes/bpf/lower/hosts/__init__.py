"""The kernel interface of handlers, for each kind of place that is probed."""
