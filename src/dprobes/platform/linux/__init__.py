"""The kernel's interfaces that engines share: system calls, one file for each, and what ``/proc`` says."""
