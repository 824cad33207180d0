"""
Machines behind a stub: their memory as the processor sees it, and the kernel that runs on them.

The kernel and its symbols are found in the machine's memory, and replace the running kernel in the resolution. Call
stacks of the kernel are unwound by its own tables, those of programs by files. The kernel's structures list the
machine's processes and their mappings. A program about the machine itself looks for a kernel on the connection of its
run.
"""
