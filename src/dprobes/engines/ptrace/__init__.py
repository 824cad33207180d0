"""
The ptrace engine: breakpoints in the processes of one process tree, without privileges.

Two processes work together. The *tracer* is a small process of its own that stops threads, runs handlers and keeps the
target's code right; ``tracer`` is its main module. The *client* (``engine``) lives in the command: it knows files and
symbols, answers the tracer's questions about them, and takes the records. They talk through two pipes (``wire``). When
the client is gone, the tracer takes all probepoints away and detaches; when the tracer is gone, the client restores the
code as well as that can be done from outside (``crash_restorer``).
"""
