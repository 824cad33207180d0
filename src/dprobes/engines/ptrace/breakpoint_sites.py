"""Where a program's breakpoints and watchpoints go, as the client tells it the tracer."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dprobes.platform.x86.debug_registers import Watch
    from dprobes.platform.x86.instruction_relocation import Copy
    from dprobes.rpn.instruction_encoding import CodeImage
    from dprobes.vm.rpn_machine import Point

__all__ = ["Code", "FileKey", "Placement", "Role", "Site", "Sites", "WatchSite"]

FileKey = tuple[int, int, str]
"""Device, inode and path of a file that is mapped executable."""


@dataclass(frozen=True, slots=True)
class Code:
    """A program's code for one architecture; its handlers are in the order of the probe definitions."""

    architecture: str
    image: CodeImage


class Placement(enum.Enum):
    """Where a probed instruction is executed."""

    EMULATED = "emulated"
    """By the tracer, on the thread's registers and stack."""
    PAGE = "in a page"
    """In a page that the process mapped for us."""
    PADDING = "in padding"
    """In the unused end of the last page of a module's code."""
    IN_PLACE = "in place"
    """With all other threads of the address space stopped."""


class Role(enum.IntEnum):
    """What a breakpoint is for."""

    PROBE = 0
    """The handler runs before the instruction."""
    RETURN = 1
    """The handler runs after the instruction, which returns from the function."""
    JUMP = 2
    """The instruction may hand over to another function, with whose return the handler runs."""
    LINKER = 3
    """The engine's own: the dynamic linker has mapped or unmapped something."""
    ENTRY = 5
    """What the handler of a return is to know of the entry is kept; no handler runs."""
    UNWINDING = 4
    """The engine's own: functions are about to be left without a return."""


@dataclass(frozen=True, slots=True)
class Site:
    """
    A place in a file where a breakpoint goes.

    ``probe`` is the probepoint, a number that the client gives, and ``definition`` the number of its definition; both
    are -1 for the engine's own breakpoints. ``original`` holds the bytes of the instruction as
    they stand in the file. ``emulation`` is a row of ``emulate``, and ``copy`` says how the instruction is executed at
    another address, None if it must be executed in place.
    """

    probe: int
    definition: int
    offset: int
    original: bytes
    emulation: tuple[Any, ...]
    copy: Copy | None = None
    point: Point | None = None
    role: Role = Role.PROBE
    inside: tuple[tuple[int, int], ...] = ()
    """For JUMP: the ranges of the function (end excluded), as distances from this instruction."""
    semaphore: int = 0
    """The distance from this instruction to the semaphore of its USDT probe, 0 if it has none."""
    kept: tuple[tuple[int, int | None], ...] = ()
    """What is kept of the entry: registers by index, and how far above the stack pointer those in memory lie."""


@dataclass(frozen=True, slots=True)
class WatchSite:
    """
    What one probepoint watches; ``probe`` and ``definition`` are those of ``Site``.

    The address in ``watch`` is a link address of the file, or with ``absolute`` one of the process.
    """

    probe: int
    definition: int
    watch: Watch
    absolute: bool
    point: Point


@dataclass(frozen=True, slots=True)
class Sites:
    """
    The sites in a file: the answer to ``ModuleMapped``.

    ``code`` is the program for the file's architecture, where the file is the probed module. ``symbols`` are the link
    addresses of the symbols that its handlers push, and ``segment`` is (file offset, link address) of the executable
    segment, from which the run-time addresses follow. ``padding`` lists (file offset, size) of what lies unused between
    the ends of code segments and those of their last pages.
    """

    sites: tuple[Site, ...] = ()
    code: Code | None = None
    symbols: tuple[tuple[str, int], ...] = ()
    segment: tuple[int, int] = (0, 0)
    padding: tuple[tuple[int, int], ...] = ()
    number: int = 0
    """That of the question."""
    native: frozenset[int] = frozenset()
    """The probepoints for which jumps will be asked for."""
    watches: tuple[WatchSite, ...] = ()
