"""
Examination of other users' files by a separate process with limits of memory and time.

dprobes itself reads only files that nobody but root and its own user can write. A child process reads each other file
that a process maps. Its reply is JSON, which is checked and becomes an ``OutlinedModule``. This module has only the
data that the probe program needs; planning treats it like any other module.
"""
