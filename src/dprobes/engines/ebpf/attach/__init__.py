"""From a program to what is attached in the kernel: files, sites, handlers and links."""
