"""
The probe manager: a background process that owns engines, inserted programs, variables and sinks.

There is one for each user; root's is the system's. ``client`` talks to it, and starts it where none runs.
"""
