"""Names, types and places that programs take from the debug information of probed modules or the kernel's BTF."""
