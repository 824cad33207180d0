"""Machines behind a stub: their memory as the processor sees it, and the kernel that runs on them."""
