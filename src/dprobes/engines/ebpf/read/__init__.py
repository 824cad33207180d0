"""Reading of a run: a session, its records and events, and the processes that handlers have stopped."""
