"""The machine below the engines: interfaces of Linux, code of processors, core dumps, and other users' files."""
