"""Kernel interfaces that several engines use: system calls, with one file for each group, and files in ``/proc``."""
