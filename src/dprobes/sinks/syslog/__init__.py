"""
Syslog servers, local or remote.

DProbes has its own sender: the standard library's handler writes RFC 3164 without structured data, octet counting or
TLS, and does not report how many messages were taken, or never arrived.
"""
