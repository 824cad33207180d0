"""
Syslog servers, here or elsewhere.

The sender is our own: the standard library's handler writes RFC 3164 without structured data, octet counting or TLS,
and does not tell how many messages were taken, or never arrived.
"""
