"""Sites of a program's breakpoints and watchpoints, in the form in which the client sends them to the tracer."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dprobes.platform.x86.debug_registers import Watch
    from dprobes.platform.x86.instruction_relocation import Copy
    from dprobes.rpn.instruction_encoding import CodeImage
    from dprobes.vm.rpn_machine import Point

__all__ = ["Code", "FileKey", "Placement", "Role", "Site", "Sites", "WatchSite"]

FileKey = tuple[int, int, str]
"""Device, inode and path of a file that is mapped executable."""


class Code(NamedTuple):
    """A probe program's code for one architecture; its handlers are in the order of the probe definitions."""

    architecture: str
    image: CodeImage


class Placement(enum.Enum):
    """Way in which a probed instruction is executed at a hit."""

    EMULATED = "emulated"
    """Emulated by the tracer, on the thread's registers and stack."""
    PAGE = "in a page"
    """As a copy in a page that the process mapped for the tracer."""
    PADDING = "in padding"
    """As a copy in the unused end of the last page of a module's code."""
    IN_PLACE = "in place"
    """At its own address, with all other threads of the address space stopped."""
    DEBUG_REGISTER = "debug register"
    """For a watchpoint: the processor stops the thread after the access."""
    PROTECTED = "protected page"
    """For a watchpoint: the thread waits before the access, which it makes while all other threads are stopped."""


class Role(enum.IntEnum):
    """Purpose of a breakpoint."""

    PROBE = 0
    """The handler runs before the instruction."""
    RETURN = 1
    """The handler runs after the instruction, which returns from the function."""
    JUMP = 2
    """The instruction may jump to another function (a tail call). The handler runs when that function returns."""
    LINKER = 3
    """Breakpoint of the engine itself: the dynamic linker has mapped or unmapped a file."""
    ENTRY = 5
    """The registers that a return handler needs from the function's entry are saved; no handler runs."""
    UNWINDING = 4
    """Breakpoint of the engine itself: stack frames are about to be discarded without a return (longjmp, unwinding)."""


class Site(NamedTuple):
    """
    Place of a breakpoint in a file.

    ``probe`` is the probepoint, a number that the client assigns, and ``definition`` the number of its definition; both
    are -1 for the engine's own breakpoints. ``original`` holds the bytes of the instruction in the file. ``emulation``
    is the result of ``instruction_emulation.plan``. ``copy`` describes how the instruction is executed at another
    address; it is None if it must be executed in place.
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
    """For JUMP: the ranges of the function (end excluded), as distances from this instruction in bytes."""
    semaphore: int = 0
    """Distance in bytes from this instruction to the semaphore of its USDT probe, or 0."""
    counters: tuple[int, ...] = ()
    """Performance counters that are read at the function's entry, as indices in ``COUNTERS``."""
    kept: tuple[tuple[int, int | None], ...] = ()
    """
    Values saved at the function's entry: each is the index of a register, and None or an offset.

    With an offset, the value is in memory, so many bytes above the stack pointer.
    """


class WatchSite(NamedTuple):
    """
    Watchpoint of one probepoint; ``probe`` and ``definition`` are as in ``Site``.

    The address in ``watch`` is a link address of the file, or with ``absolute`` an address in the process.
    """

    probe: int
    definition: int
    watch: Watch
    absolute: bool
    point: Point


class Sites(NamedTuple):
    """
    Sites of a program in a file: the reply to ``ModuleMapped``.

    If the file is the probed module, ``code`` is the program for the file's architecture. ``symbols`` has the link
    addresses of the symbols that its handlers push. ``segment`` is (file offset, link address) of the executable
    segment, from which run-time addresses are computed. ``padding`` lists (file offset, size) of the unused bytes
    between the end of each code segment and the end of its last page.
    """

    sites: tuple[Site, ...] = ()
    code: Code | None = None
    symbols: tuple[tuple[str, int], ...] = ()
    segment: tuple[int, int] = (0, 0)
    padding: tuple[tuple[int, int], ...] = ()
    number: int = 0
    """Number of the ``ModuleMapped`` message to which this is the reply."""
    native: frozenset[int] = frozenset()
    """Probepoints for which jumps will be requested."""
    watches: tuple[WatchSite, ...] = ()
