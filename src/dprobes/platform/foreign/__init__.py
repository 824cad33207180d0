"""
Files of other users, read by a separate process with limits of memory and time.

Files that only root and the user can write are read directly. All other files that a process maps are read by a child
process, one for each file. Its answer is JSON, which is checked and becomes an ``OutlinedModule``. That contains what a
program needs and nothing else, and planning treats it like any other module.
"""
