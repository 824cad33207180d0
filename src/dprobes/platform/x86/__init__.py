"""Support for x86 that engines share: emulation, relocation and stepping of instructions, and debug registers."""
