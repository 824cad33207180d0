"""
Machines behind a stub: their memory as the processor sees it, and the kernel that runs on them.

The kernel and its symbols are found in the machine's memory, and take the place of the running kernel for resolution.
Call stacks of the kernel are walked by its own tables, those of programs by files. For programs in the machine the
kernel's structures tell which processes there are and what they have mapped. A program about whatever runs asks for a
kernel on its own connection.
"""
