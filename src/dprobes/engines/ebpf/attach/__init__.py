"""Attachment of a probe program to the kernel: files, sites, handlers and links."""
