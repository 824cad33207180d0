"""
Machines that a stub serves: their linear and physical memory, and the kernel that runs on them.

The kernel and its symbols are found in the machine's memory, and are resolved in place of this machine's kernel. Call
stacks in the kernel are unwound by its ORC tables, call stacks in user space by the unwind tables of files. The
machine's processes and their mappings are read from the kernel's structures. A program that probes the machine itself
looks for a kernel on the connection of its run.
"""
