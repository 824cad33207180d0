"""Log targets on this machine: files, serial lines, commands, and the system's logs."""
