"""The gdb engine: machines, processes and systems behind a stub that speaks the GDB remote serial protocol."""
