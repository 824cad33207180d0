"""Attachment of a program to the kernel: files, sites, handlers and links."""
