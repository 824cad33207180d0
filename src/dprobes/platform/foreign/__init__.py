"""
Files of other users, read by a separate process with limits of memory and time.

Files that only root and the user can write are read directly. All other files that a process maps are read by a child
process, one for each file. Its reply is JSON, which is checked and becomes an ``OutlinedModule``. Such a module has
only the data that the probe program needs; planning treats it like any other module.
"""
