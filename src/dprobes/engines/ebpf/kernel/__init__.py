"""Interface of the eBPF engine to the kernel: system calls, kernel objects, features and types."""
