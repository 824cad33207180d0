"""
Files of other users: read by a process of its own, with limits of memory and time.

Files that only root and the user can write are read directly. All others that a process maps are read by a child for
each file. Its answer is JSON, which is checked and becomes an ``OutlinedModule``: it contains what a program needs and
nothing else, and planning does not see a difference.
"""
