"""The command line: the only part that knows about terminals, exit statuses and option names."""
