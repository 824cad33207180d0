"""Parts of engines that are specific to x86: emulation, relocation and stepping of instructions; debug registers."""
