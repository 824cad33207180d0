"""
The eBPF engine: breakpoints in every process that maps a file, with handlers that run in the kernel.

``syscalls`` and ``perf`` are the only files that make bpf(2) and perf_event_open(2); ``maps`` and ``ring`` are the
memory shared with programs, which ``bpf.map_layouts`` describes.
"""
