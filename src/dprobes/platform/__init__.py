"""Platform of the engines: interfaces of Linux, machine code, core dumps, and other users' files."""
