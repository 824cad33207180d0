"""Files of other users: read by a process of its own, with limits of memory and time."""
