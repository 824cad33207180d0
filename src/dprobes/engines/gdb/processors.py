"""
Processors as stubs name them: names of registers, breakpoint instructions, and what belongs to a call.

One row for each architecture of ours; its registers are named as in GDB's descriptions (GDB manual, appendix G.5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.arch.riscv import ABI_NAMES, FLOATING_ABI_NAMES
from dprobes.engines.gdb.description import RegisterPlace, TargetDescription
from dprobes.errors import EngineError
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.arch import Architecture

__all__ = ["StubProcessor", "architecture_described_as", "check_description", "processor_of", "registers_of"]


@dataclass(frozen=True, slots=True)
class StubProcessor:
    """
    Say how a processor looks through a stub.

    ``descriptions`` are the names that descriptions give it, ``names`` those of our registers that have another one
    there, or several, of which a stub has one; ``pc`` and ``sp`` its names of these. ``link`` is the register that has
    the return address when a function begins, "" if that is on top of the stack; ``dropped`` is how many bytes of
    arguments a function may take from the stack as it returns. ``breakpoint`` is the shortest breakpoint instruction;
    behind it the pc is ``moved`` bytes on, where a stub does not correct that. ``order`` is what GDB takes for the
    registers without a description, with their sizes in bytes.
    """

    descriptions: frozenset[str]
    names: Mapping[str, Sequence[str]]
    pc: str
    sp: str
    breakpoint: bytes
    order: Sequence[tuple[str, int]]
    moved: int = 0
    link: str = ""
    dropped: int = 0

    def registers(self, name: str) -> Sequence[str]:
        """Return the names that stubs may have for a register."""
        return self.names.get(name, (name,))

    def default_description(self) -> TargetDescription:
        """Return what holds where a stub describes nothing."""
        places, offset = {}, 0
        for number, (name, size) in enumerate(self.order):
            places[name] = RegisterPlace(name, number, offset, size)
            offset += size
        return TargetDescription("", places)


def _numbered(ours: str, theirs: Sequence[str], count: int) -> dict[str, Sequence[str]]:
    """Return the names of registers with numbers, behind which another word stands in a stub."""
    return {f"{ours}{n}": tuple(f"{each}{n}" for each in theirs) for n in range(count)}


_SEGMENTS = ("cs", "ss", "ds", "es", "fs", "gs")
_I386 = ("eax", "ecx", "edx", "ebx", "esp", "ebp", "esi", "edi", "eip", "eflags", *_SEGMENTS)
_AMD64 = ("rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rbp", "rsp", *(f"r{n}" for n in range(8, 16)), "rip")
_INT3 = b"\xcc"
_X87: dict[str, Sequence[str]] = {
    **_numbered("fr", ("st",), 8),
    "fcw": ("fctrl",),
    "fsw": ("fstat",),
    "ftw": ("ftag",),
    "fip": ("fioff",),
    "fcs": ("fiseg",),
    "fdp": ("fooff",),
    "fds": ("foseg",),
}

_ZSERIES: dict[str, Sequence[str]] = {
    "pswmask": ("pswm",),
    "pswaddr": ("pswa",),
    **_numbered("gpr", ("r",), 16),
    **_numbered("fpr", ("f",), 16),
    **_numbered("cr_", ("cr",), 16),
}
_ZSERIES_REGISTERS = ("pswm", "pswa", *(f"r{n}" for n in range(16)))
_ZSERIES_TRAP = b"\x00\x01"  # an instruction that there is not; the kernel makes SIGTRAP of it

_POWER: dict[str, Sequence[str]] = {
    "nip": ("pc",),
    "lnk": ("lr",),
    "ccr": ("cr",),
    "fpc": ("fpscr",),
    **_numbered("fpr", ("f",), 32),
}
_POWER_TRAP = b"\x7f\xe0\x00\x08"  # tw 31, r0, r0


def _power_order(word: int) -> list[tuple[str, int]]:
    general = [(f"r{n}", word) for n in range(32)]
    floating = [(f"f{n}", 8) for n in range(32)]
    special = [("pc", word), ("msr", word), ("cr", 4), ("lr", word), ("ctr", word), ("xer", 4), ("fpscr", 4)]
    return [*general, *floating, *special]


_PROCESSORS = {
    "i386": StubProcessor(
        frozenset({"i386", "i386:intel"}), _X87, "eip", "esp", _INT3, [(name, 4) for name in _I386], 1, dropped=255
    ),
    "x86_64": StubProcessor(
        frozenset({"i386:x86-64", "i386:x86-64:intel"}),
        _X87
        | {
            f"e{name[1:]}": (name,) for name in _AMD64 if not name[1:].isdecimal() and name[0] == "r" and len(name) == 3
        },
        "rip",
        "rsp",
        _INT3,
        [*((name, 8) for name in _AMD64), ("eflags", 4), *((name, 4) for name in _SEGMENTS)],
        1,
    ),
    "aarch64": StubProcessor(
        frozenset({"aarch64"}),
        {"pstate": ("cpsr",), **_numbered("v", ("v", "z"), 32)},  # a vector of SVE begins with the shorter one
        "pc",
        "sp",
        bytes.fromhex("000020d4"),  # brk #0
        [*((f"x{n}", 8) for n in range(31)), ("sp", 8), ("pc", 8), ("cpsr", 4)],
        link="x30",
    ),
    "riscv64": StubProcessor(
        frozenset({"riscv:rv64", "riscv"}),
        {f"x{n}": (name, f"x{n}") for n, name in enumerate(ABI_NAMES)}
        | {f"f{n}": (name, f"f{n}") for n, name in enumerate(FLOATING_ABI_NAMES)}
        | {"x8": ("fp", "s0", "x8")},
        "pc",
        "sp",
        bytes.fromhex("0290"),  # c.ebreak
        [*((name if name != "s0" else "fp", 8) for name in ABI_NAMES), ("pc", 8)],
        link="ra",
    ),
    "s390": StubProcessor(
        frozenset({"s390:31-bit"}),
        _ZSERIES,
        "pswa",
        "r15",
        _ZSERIES_TRAP,
        [(name, 4) for name in _ZSERIES_REGISTERS],
        2,
        link="r14",
    ),
    "s390x": StubProcessor(
        frozenset({"s390:64-bit"}),
        _ZSERIES,
        "pswa",
        "r15",
        _ZSERIES_TRAP,
        [(name, 8) for name in _ZSERIES_REGISTERS],
        2,
        link="r14",
    ),
    "ppc": StubProcessor(frozenset({"powerpc:common"}), _POWER, "pc", "r1", _POWER_TRAP, _power_order(4), link="lr"),
    "ppc64": StubProcessor(
        frozenset({"powerpc:common64"}), _POWER, "pc", "r1", _POWER_TRAP, _power_order(8), link="lr"
    ),
}


def check_description(description: TargetDescription, processor: StubProcessor, stub: str) -> None:
    """Raise ``EngineError`` if the description of the stub called ``stub`` lacks what nothing can be done without."""
    for name in (processor.pc, processor.sp):
        if name not in description.registers:
            raise EngineError(f"the stub {stub} describes no register '{name}'")


def registers_of(
    architecture: Architecture, processor: StubProcessor, description: TargetDescription
) -> dict[int, str]:
    """Return the names in a stub's description of our registers, by their index, as far as it has them."""
    found: dict[int, str] = {}
    for register in architecture.registers:
        names = [name for name in processor.registers(register.name) if name in description.registers]
        found |= {register.index: names[0]} if names else {}
    return found


def processor_of(architecture: Architecture) -> StubProcessor | None:
    """Return the row of an architecture, None if there is none."""
    return _PROCESSORS.get(architecture.name)


def architecture_described_as(description: str) -> Architecture | None:
    """Return the architecture that stubs describe by a name, None if there is none."""
    from dprobes.arch import architecture

    return next((architecture(name) for name, row in _PROCESSORS.items() if description in row.descriptions), None)
