"""From the ring to events: a session, its records, and what becomes of the processes in it."""
