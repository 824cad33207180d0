"""
Syslog servers, local or remote.

DProbes has its own sender: the handler of Python's standard library writes RFC 3164 without structured data, octet
counting or TLS, and does not report the numbers of sent and lost messages.
"""
