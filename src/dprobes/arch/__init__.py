"""
Processors: word size, byte order, registers, and the opcodes that can never have a probe.

Each family has a file with the table of its appendix in the man page as data. No module here accesses a running system.
"""

from __future__ import annotations

from dprobes.arch.processor import Architecture, ByteOrder, Direction, Register, RegisterClass

__all__ = [
    "ARCHITECTURE_NAMES",
    "Architecture",
    "ByteOrder",
    "Direction",
    "Register",
    "RegisterClass",
    "architecture",
    "go_architecture",
    "host_architecture",
    "is_of_system",
]

ARCHITECTURE_NAMES = ("x86_64", "i386", "s390", "s390x", "ppc", "ppc64", "aarch64", "riscv64")
"""Names for ``--arch``. They are those of ``uname -m`` where that has one."""


def architecture(name: str) -> Architecture:
    """Return the architecture called ``name``; raise KeyError for any other."""
    match name:
        case "x86_64" | "i386":
            from dprobes.arch import x86_processors

            return x86_processors.X86_64 if name == "x86_64" else x86_processors.I386
        case "s390" | "s390x":
            from dprobes.arch import non_x86_processors

            return non_x86_processors.S390X if name == "s390x" else non_x86_processors.S390
        case "ppc" | "ppc64":
            from dprobes.arch import non_x86_processors

            return non_x86_processors.PPC64 if name == "ppc64" else non_x86_processors.PPC
        case "aarch64":
            from dprobes.arch import non_x86_processors

            return non_x86_processors.AARCH64
        case "riscv64":
            from dprobes.arch import non_x86_processors

            return non_x86_processors.RISCV64
    raise KeyError(name)


def is_of_system(register: str) -> bool:
    """Return True if a name is that of an x86 system register, whose value is bits or an address, such as cr0."""
    found = architecture("x86_64").register(register)
    return found is not None and found.kind is RegisterClass.SYSTEM


def go_architecture() -> Architecture:
    """Return x86-64 with the argument registers of Go's functions (ABIInternal) as ``arg0`` and so on."""
    from dprobes.arch import x86_processors

    return x86_processors.X86_64_GO


def host_architecture() -> Architecture:
    """Return the architecture of this machine's kernel (uname(2)), or x86-64 if the tables lack it."""
    import os

    machine = os.uname().machine
    return architecture(machine if machine in ARCHITECTURE_NAMES else "x86_64")
