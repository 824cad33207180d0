"""Kernel interfaces that engines share: system calls, one file for each group, and files of ``/proc``."""
