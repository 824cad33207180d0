"""A jump to handlers in a process, as data: what is written, what must be there before, and where threads go on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["OF_64_BITS", "TRAP_OF_32_BITS", "CodeCopy", "NativeStop", "PatchSwitch", "SitePatch", "without_jump"]

_INT3 = 0xCC

OF_64_BITS = bytes.fromhex("67 0f 1f 84 00 00 0f 0b 00")
"""
A nop of 64-bit code. In 32-bit code the prefix means addresses of 16 bits: it is a shorter nop, and UD2 behind it.

A jump has the same bytes in both, so a thread in 32-bit code comes here, if the code is within its reach.
"""
TRAP_OF_32_BITS = 6
"""Where UD2 is in it."""


class CodeCopy(NamedTuple):
    """
    Say that the instruction at the address ``copy`` belongs to what the program has at ``original``.

    It is ``exact`` where a thread that is stopped there is as one at ``original`` would be.
    """

    copy: int
    original: int
    exact: bool


class NativeStop(NamedTuple):
    """
    Say that a thread that stops at the instruction at ``place``, in our code, has run into the breakpoint at ``site``.

    It faults there, or with ``is_trap`` it traps. Its stack pointer is at a frame (``native.x86.trampoline``), which
    with ``has_frame`` has the other registers that the program would not find as they are, with ``has_flags`` all flags
    as PUSHFQ pushes them.

    With an ``exit_code`` it has been hit already: the handler of a ``program``'s probepoint has ended with that.
    """

    place: int
    site: int
    is_trap: bool
    has_frame: bool
    has_flags: bool
    exit_code: int = 0
    probe: int = 0
    program: int = 0


class PatchSwitch(NamedTuple):
    """
    Say that ``on``, the code at ``address``, lets handlers run up to ``end``, and ``off`` in its place leaves them out.

    They are for ``sites``, which are some of the jump's.
    """

    address: int
    on: bytes
    off: bytes
    end: int
    sites: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class SitePatch:
    """
    A jump that takes the place of the breakpoints at ``sites``, (program, probepoint, address) each.

    ``code`` is what the file has from ``start`` on: the displaced instructions, and before them a mark for indirect
    branches where there is one. ``relied_on`` are an address and the bytes that memory must have there besides: a
    punned jump shares them. ``writes`` are the bytes to be written, in order, and ``originals`` what the file has
    there. None of them lies in two pages, so each is written whole or not at all.

    ``moves`` say for addresses in the displaced code where a thread goes on that stands there. ``copies`` are of the
    displaced instructions, in order; their code ends at ``end``. ``method`` is how a summary calls the jump. Of those
    with one of the ``groups`` there are all or none. ``stops`` are where handlers leave a hit to the breakpoint.

    Its code begins at ``begin``, in the memory of the program ``owner``. A jump to handlers of several programs has
    ``switches``, by which it goes on without some of them. It ``traps`` whoever comes into its middle; else nobody may.
    """

    sites: tuple[tuple[int, int, int], ...]
    start: int
    code: bytes
    relied_on: tuple[int, bytes]
    writes: tuple[tuple[int, bytes], ...]
    originals: tuple[bytes, ...]
    moves: tuple[tuple[int, int], ...] = ()
    copies: tuple[CodeCopy, ...] = ()
    end: int = 0
    method: str = ""
    groups: tuple[tuple[int, int], ...] = ()
    stops: tuple[NativeStop, ...] = ()
    owner: int | None = None
    switches: tuple[PatchSwitch, ...] = ()
    begin: int = 0
    traps: bool = True

    @property
    def back(self) -> int:
        """Where a thread goes on behind the displaced code."""
        return self.start + len(self.code)

    @property
    def place(self) -> int | None:
        """The address of the displaced code, by which a jump is known; None if it has none."""
        return self.copies[0].copy if self.copies else None

    @property
    def users(self) -> frozenset[int]:
        """The programs whose memory it needs."""
        return self.programs | (frozenset() if self.owner is None else {self.owner})

    def only(self, sites: Iterable[tuple[int, int, int]]) -> SitePatch:
        """Return the jump as it is for no more than these; one without switches is the same."""
        present = set(sites)
        kept = tuple(site for site in self.sites if site in present)
        if not self.switches or len(kept) == len(self.sites):
            return self
        programs = {program for program, _, _ in kept}
        return replace(self, sites=kept, groups=tuple(group for group in self.groups if group[0] in programs))

    def switched(self) -> Iterator[tuple[int, bytes]]:
        """Iterate over the switches, each with the bytes that it must have."""
        for switch in self.switches:
            yield switch.address, switch.off if set(self.sites).isdisjoint(switch.sites) else switch.on

    def code_of(self, program: int) -> list[tuple[int, int]]:
        """Return where code is that only handlers of a program need, (start, end) each, behind its switches."""
        return [
            (switch.address + len(switch.on), switch.end)
            for switch in self.switches
            if {number for number, _, _ in switch.sites} == {program}
        ]

    @property
    def addresses(self) -> tuple[int, ...]:
        """The addresses of the probed instructions."""
        return tuple(dict.fromkeys(address for _, _, address in self.sites))

    @property
    def probes(self) -> tuple[tuple[int, int], ...]:
        """The probepoints, (program, probepoint) each."""
        return tuple(dict.fromkeys((program, probe) for program, probe, _ in self.sites))

    @property
    def programs(self) -> frozenset[int]:
        """The programs whose handlers it leads to."""
        return frozenset(program for program, _, _ in self.sites)

    def way_on(self, address: int) -> int:
        """Return where a thread goes on that stands at an instruction and has not executed it."""
        return next((copy for original, copy in self.moves if original == address), address)

    def copy_of(self, address: int) -> int | None:
        """Return where a thread goes on that stands at an instruction, or at the mark before it, and has been hit."""
        return next((each.copy for each in self.copies if each.exact and each.original >= address), None)

    def probes_at(self, address: int) -> set[tuple[int, int]]:
        """Return the probepoints at an address."""
        return {(program, probe) for program, probe, site in self.sites if site == address}

    def used_bytes(self) -> set[int]:
        """Return the addresses of the bytes that the jump needs as they are: written, relied on, or displaced."""
        return {*self.relied_bytes(), *self.displaced_bytes(), *self.written_bytes()}

    def relied_bytes(self) -> range:
        """Return the addresses of the bytes that the jump shares."""
        first, shared = self.relied_on
        return range(first, first + len(shared))

    def displaced_bytes(self) -> range:
        """Return the addresses of the code that is executed elsewhere."""
        return range(self.start, self.start + len(self.code))

    def written_bytes(self) -> set[int]:
        """Return the addresses of the bytes that are written."""
        return {place for address, data in self.writes for place in range(address, address + len(data))}


def without_jump(found: bytes, data: bytes, original: bytes) -> bytes | None:
    """
    Return what was ``found`` where a jump has ``data`` and the file ``original``, without what is left of the jump.

    The breakpoint of a uprobe stays, which the kernel takes away. None if something else is there.
    """
    if len(found) < len(data):
        return None
    triples = [*zip(found, data, original, strict=True)]
    if any(byte not in (mine, filed, _INT3) for byte, mine, filed in triples):
        return None
    return bytes(filed if byte == mine else byte for byte, mine, filed in triples)
