"""What the eBPF engine asks of the kernel: system calls, kernel objects, features and types."""
