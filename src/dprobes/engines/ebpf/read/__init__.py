"""Reader of a run's output: the session, its records and events, and the processes that handlers have stopped."""
