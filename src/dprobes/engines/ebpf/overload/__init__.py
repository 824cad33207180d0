"""The overload guard of a program in the kernel: what hits cost, where that is measured, and who watches it."""
