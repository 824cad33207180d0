"""What probed modules say to a program: names, types and places of their debug information, or of the kernel's BTF."""
