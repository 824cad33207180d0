"""Syslog servers, here or elsewhere."""
