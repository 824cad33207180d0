"""Log targets on this machine: files, lines, commands, and the logs of the system."""
