"""Interfaces of Linux, machine code, core files and files of other users, as engines need them."""
