"""
Jumps in an address space that lead from probed instructions to handlers in the process, as data and as bytes.

A jump takes the place of breakpoints that are known here: where it is taken out, they can come back. One that relies
on bytes of another one goes with that. Bytes are written while no thread of the space runs.

A uprobe that anybody inserts later is in all processes, also over a jump: the kernel looks at the file alone. It makes
one byte a breakpoint, and the file's again when it goes: then what is left of the jump is no code that anybody wrote.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right, insort
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from dprobes.bpf.map_layouts import CallTable
    from dprobes.platform.x86.instruction_relocation import CodeCopy

__all__ = [
    "OF_64_BITS",
    "TRAP_OF_32_BITS",
    "NativeMemory",
    "NativeStop",
    "PatchSwitch",
    "Patches",
    "SitePatch",
    "without_jump",
]

_INT3 = 0xCC

OF_64_BITS = bytes.fromhex("67 0f 1f 84 00 00 0f 0b 00")
"""
A nop of 64-bit code. In 32-bit code the prefix means addresses of 16 bits: it is a shorter nop, and UD2 behind it.

A jump has the same bytes in both, so a thread in 32-bit code comes here, if the code is within its reach.
"""
TRAP_OF_32_BITS = 6
"""Where UD2 is in it."""


class NativeStop(NamedTuple):
    """
    The instruction at ``place``, in our code: a thread that stops there has run into the breakpoint at ``site``.

    It faults there, or with ``is_trap`` it traps. Its stack pointer is at a frame (``x86_operations``), which
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
    The code at ``address``: ``on`` lets handlers run up to ``end``, and ``off`` in its place leaves them out.

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


@dataclass(frozen=True, slots=True)
class NativeMemory:
    """
    The places where a process has what handlers in it share with the client.

    ``page`` is what only the process has (``native.process_page``), ``own`` bytes with the ``calls`` behind it, and
    ``region`` the memory for maps. ``others``, (address, size) each, belong to other programs as well, and
    the ``manifest`` lists all that is written (``restorer_messages``).
    """

    page: int
    own: int
    region: int
    size: int
    calls: CallTable | None = None
    others: tuple[tuple[int, int], ...] = ()
    manifest: tuple[int, int] | None = None

    @property
    def shared(self) -> tuple[tuple[int, int], ...]:
        """What is mapped of files, (address, size) each."""
        manifest = () if self.manifest is None else (self.manifest,)
        return (self.region, self.size), *self.others, *manifest


@dataclass(slots=True, eq=False)
class Patches:
    """The jumps of one address space, by the addresses of the probed instructions."""

    memories: dict[int, NativeMemory] = field(default_factory=dict)
    """The shared memory of each program, by its number."""
    by_site: dict[int, SitePatch] = field(default_factory=dict)
    code: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """What is mapped for code, (start, end) each, by what ``memories`` has for those who use it."""
    fixups: dict[int, int] = field(default_factory=dict)
    """Where a thread goes on that faults in our code, by the address of the instruction."""
    stops: dict[int, NativeStop] = field(default_factory=dict)
    """Where a thread in our code leaves its hit to the breakpoint, by the address of the instruction."""
    displaced: dict[int, SitePatch] = field(default_factory=dict)
    """All jumps that there have been, by the address of their displaced code: threads may still be in it."""
    starts: list[int] = field(default_factory=list)
    """Those addresses, in order."""
    known: dict[int, SitePatch] = field(default_factory=dict)
    """
    The jumps whose code is there, by the address of their displaced code: whole, and the latest last.

    Those that are in memory may be for some of their probepoints only.
    """
    places: dict[int, list[int]] = field(default_factory=dict)
    """Those addresses by the addresses of instructions, in order."""
    users: dict[int, list[SitePatch]] = field(default_factory=dict)
    """The jumps that need a byte as it is, by its address."""
    listed: dict[int, set[object]] = field(default_factory=dict)
    """What is in the manifest of each memory, by its page: jumps and breakpoints as their bytes."""
    unlisted: set[int] = field(default_factory=set)
    """The pages of the memories whose manifests lack breakpoints."""
    occupied: int = 0
    """How often something was where code was to be mapped."""

    def begin_list(self, memory: NativeMemory) -> None:
        """Note that the manifest of a memory is empty: there may have been another one at its place."""
        self.listed[memory.page] = set()
        self.unlisted.discard(memory.page)

    def learn(self, patches: Iterable[SitePatch]) -> None:
        """Take notice of jumps whose code has been written."""
        for patch in patches:
            if patch.place is not None and patch.place not in self.known:  # it may come for some of them only, later
                self.known[patch.place] = patch
                for site in patch.addresses:
                    self.places.setdefault(site, []).append(patch.place)

    def give_up(self, sites: Iterable[int]) -> None:
        """Have no jump any more that is at one of these places."""
        self._unlearn({place for site in sites for place in self.places.get(site, ())})

    def known_at(self, sites: Collection[int] | None = None) -> list[SitePatch]:
        """Return the jumps that may be at some places, or at any, the latest first."""
        if sites is None:
            return list(reversed(self.known.values()))
        found = dict.fromkeys(place for site in sites for place in reversed(self.places.get(site, ())))
        return [self.known[place] for place in found]

    def _unlearn(self, gone: Collection[int]) -> None:
        for patch in [self.known.pop(place) for place in gone if place in self.known]:
            for site in patch.addresses:
                left = [place for place in self.places.get(site, ()) if place != patch.place]
                if left:
                    self.places[site] = left
                else:
                    self.places.pop(site, None)

    def code_of(self, number: int) -> list[tuple[int, int]]:
        """Return where code is that needs what a program has, (start, end) each: its own, and parts of others'."""
        parts = [part for patch in self.known.values() for part in patch.code_of(number)]
        return [*self.code.get(number, ()), *parts]

    def write(self, memory: int, patch: SitePatch) -> None:
        """Write a jump; raise OSError, with nothing changed, if that is not possible."""
        for address, data in patch.switched():
            os.pwrite(memory, data, address)
        done: list[tuple[int, bytes]] = []
        try:
            for address, data in patch.writes:
                before = os.pread(memory, len(data), address)
                done.append((address, before))
                os.pwrite(memory, data, address)
        except OSError:
            for address, before in reversed(done):
                with contextlib.suppress(OSError):
                    os.pwrite(memory, before, address)
            raise
        for former in {self.by_site[site] for site in patch.addresses if site in self.by_site}:
            self._drop(former)  # it is larger now
        self._note(patch)
        if patch.copies:
            place = patch.copies[0].copy
            if place not in self.displaced:
                insort(self.starts, place)
            self.displaced[place] = patch
        self.stops.update((stop.place, stop) for stop in patch.stops)

    def is_there(self, memory: int, site: int) -> bool:
        """Return whether memory has the jump of a place."""
        patch = self.by_site.get(site)
        return patch is not None and all(os.pread(memory, len(data), at) == data for at, data in patch.writes)

    def _note(self, patch: SitePatch) -> None:
        self.by_site.update(dict.fromkeys(patch.addresses, patch))
        for place in patch.used_bytes():
            self.users.setdefault(place, []).append(patch)

    def restore(self, memory: int, sites: Iterable[int]) -> set[int]:
        """
        Put the bytes of the file back at these places, wherever a jump of ours is still there.

        Return all places that have no jump any more: several may have had the same one.
        """
        gone: set[int] = set()
        waiting = list(dict.fromkeys(patch for site in sites if (patch := self.by_site.get(site)) is not None))
        while waiting:
            patch = waiting[-1]
            if depending := self._depending_on(patch):
                waiting += depending
                continue
            waiting.pop()
            self._drop(patch)
            gone.update(patch.addresses)
            for (address, data), original in zip(reversed(patch.writes), reversed(patch.originals), strict=True):
                with contextlib.suppress(OSError):
                    found = os.pread(memory, len(data), address)
                    left = without_jump(found, data, original)
                    if left is not None and left != found:
                        os.pwrite(memory, left, address)
        return gone

    def mend(self, memory: int, read: Callable[[int, int], bytes]) -> bool:
        """
        Write the bytes of jumps again that uprobes have replaced; return whether there were any.

        The kernel leaves them alone then when the uprobe goes. Each is written alone, as threads may run meanwhile. A
        uprobe on a mark for indirect branches does no harm, and where all is the file's again there is no jump.
        """
        is_mended = False
        for patch in dict.fromkeys(self.by_site.values()):
            pieces = [each for each in zip(patch.writes, patch.originals, strict=True) if each[0][1] != each[1]]
            for (address, data), original in (*pieces, (patch.relied_on, patch.relied_on[1])):
                with contextlib.suppress(OSError):
                    found = read(address, len(data))
                    if found in (data, original) or without_jump(found, data, original) is None:
                        continue
                    for place, byte in enumerate(data):
                        if found[place] != byte:
                            os.pwrite(memory, data[place : place + 1], address + place)
                            is_mended = True
        return is_mended

    def _drop(self, patch: SitePatch) -> None:
        for site in patch.addresses:
            self.by_site.pop(site, None)
        for place in patch.used_bytes():
            left = [other for other in self.users.get(place, ()) if other is not patch]
            if left:
                self.users[place] = left
            else:
                self.users.pop(place, None)

    def _depending_on(self, patch: SitePatch) -> set[SitePatch]:
        """Return the jumps that rely on what a jump has written."""
        written = patch.written_bytes()
        others = {other for place in written for other in self.users.get(place, ()) if other is not patch}
        return {other for other in others if not written.isdisjoint(other.relied_bytes())}

    def near(self, start: int, end: int) -> set[SitePatch]:
        """Return the jumps that need bytes from ``start`` to ``end`` (excluded) as they are."""
        return {patch for place in range(start, end) for patch in self.users.get(place, ())}

    def relying_on(self, address: int) -> list[int]:
        """Return the places of the jumps that need the byte at an address as it is."""
        return [site for patch in self.near(address, address + 1) for site in patch.addresses]

    def bound_to(self, sites: Iterable[int]) -> list[int]:
        """Return those of the places where there are jumps, and others that cannot have theirs without them."""
        found: set[SitePatch] = set()
        groups: set[tuple[int, int]] = set()
        more = {self.by_site[site] for site in sites if site in self.by_site}
        while more:
            found |= more
            groups |= {group for patch in more for group in patch.groups}
            more = {p for p in self.by_site.values() if not groups.isdisjoint(p.groups)} - found if groups else set()
        return [site for patch in found for site in patch.addresses]

    @contextlib.contextmanager
    def put_aside(self, memory: int, site: int) -> Iterator[None]:
        """Have the bytes of the file in the place of the jump at ``site`` for a while, if there is one."""
        patch = self.by_site.get(site)
        if patch is None:
            yield
            return
        aside = [patch, *self._depending_on(patch)]
        self.restore(memory, [site])
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                for each in aside:
                    self.write(memory, each)

    def hide(self, address: int, data: bytearray) -> None:
        """Let ``data``, which was read at ``address``, show the code of the file."""
        end = address + len(data)
        for patch in self.near(address, end):
            for (start, written), original in zip(patch.writes, patch.originals, strict=True):
                first, last = max(start, address), min(start + len(written), end)
                if first < last:
                    data[first - address : last - address] = original[first - start : last - start]

    def originals(self) -> dict[int, int]:
        """Return the bytes of the file by their addresses, where jumps are."""
        return {
            start + place: byte
            for patch in self.by_site.values()
            for (start, _), data in zip(patch.writes, patch.originals, strict=True)
            for place, byte in enumerate(data)
        }

    def ranges(self) -> list[tuple[int, int]]:
        """Return what is mapped for handlers, (start, end) each."""
        own = [(memory.page, memory.page + memory.own) for memory in self.memories.values()]
        shared = [(at, at + size) for memory in self.memories.values() for at, size in memory.shared]
        return [*self.code_ranges(), *own, *shared]

    def code_ranges(self) -> list[tuple[int, int]]:
        """Return what is mapped for code, (start, end) each."""
        return [each for ranges in self.code.values() for each in ranges]

    def original_of(self, pc: int) -> tuple[SitePatch, CodeCopy] | None:
        """Return what a thread executes that is in displaced code; None if it is not in any."""
        number = bisect_right(self.starts, pc) - 1
        if number < 0:
            return None
        patch = self.displaced[self.starts[number]]
        if pc >= patch.end:
            return None
        copies = patch.copies
        return patch, copies[bisect_right(copies, pc, key=lambda each: each.copy) - 1]

    def reached(self, pc: int) -> tuple[SitePatch, int] | None:
        """
        Return the jump in whose code a thread has just come to an instruction of the program, and its address there.

        None between two of them, at the first one, which the thread had come to before the jump, and elsewhere.
        """
        found = self.original_of(pc)
        if found is None:
            return None
        patch, copy = found
        for original, place in patch.moves:
            if place == pc and original != patch.start:
                return patch, original
        if copy.copy == pc and copy.exact and not patch.start <= copy.original < patch.back:
            return patch, copy.original
        return None

    def is_ours(self, pc: int) -> bool:
        """Return whether an instruction is none of the program's: it is on the way of a jump, or in our code."""
        if any(start <= pc < end for start, end in self.code_ranges()):
            return True
        return any(
            pc == address and pc not in patch.displaced_bytes()
            for patch in self.users.get(pc, ())
            for address, _ in patch.writes
        )

    def way_on(self, address: int) -> int:
        """Return where a thread goes on that stands at an instruction, which a jump may have displaced."""
        moved = (patch.way_on(address) for patch in self.near(address, address + 1))
        return next((place for place in moved if place != address), address)

    def copy_for_child(
        self, memory: int, read: Callable[[int, int], bytes], is_mapped: Callable[[int], bool]
    ) -> Patches:
        """
        Return the same for a forked child, and take what is in its memory and should not be there any more out of it.

        The kernel has copied the memory some time ago: what was mapped or written since then is not in it. It is
        ``read`` where it ``is_mapped``.
        """
        former = [patch for patch in self.displaced.values() if self.by_site.get(patch.addresses[0]) is not patch]
        copy = Patches(
            {number: each for number, each in self.memories.items() if is_mapped(each.page) and is_mapped(each.region)},
            code={number: [each for each in ranges if is_mapped(each[0])] for number, ranges in self.code.items()},
            fixups=dict(self.fixups),
            stops=dict(self.stops),
            displaced=dict(self.displaced),
            starts=list(self.starts),
        )
        copy.learn(patch for place, patch in self.known.items() if is_mapped(place))
        for patch in (*self.by_site.values(), *former):
            if patch.addresses[0] not in copy.by_site and _is_there(read, patch):
                copy._note(patch)
        copy.restore(memory, [patch.addresses[0] for patch in former if copy.by_site.get(patch.addresses[0]) is patch])
        for address, data in (switch for patch in set(copy.by_site.values()) for switch in patch.switched()):
            with contextlib.suppress(OSError):
                os.pwrite(memory, data, address)  # a program may have gone meanwhile
        return copy

    def is_used(self, memory: int, number: int) -> bool:
        """Return whether a jump to code of a program is known, or in memory all the same."""

        def read(address: int, size: int) -> bytes:
            return os.pread(memory, size, address)

        former = (patch for patch in self.displaced.values() if number in patch.users)
        return any(number in patch.users for patch in self.by_site.values()) or any(
            _is_there(read, patch) for patch in former
        )

    def forget_program(self, number: int) -> None:
        """Forget what a program had that is not mapped any more: its addresses may be those of others one day."""
        gone = self.code.pop(number, [])
        memory = self.memories.pop(number, None)
        if memory is not None:
            self.listed.pop(memory.page, None)
            self.unlisted.discard(memory.page)
        self.starts = [place for place in self.starts if not _is_in(place, gone)]
        self._unlearn([place for place in self.known if _is_in(place, gone)])
        for known in (self.displaced, self.stops, self.fixups):
            for place in [place for place in known if _is_in(place, gone)]:
                del known[place]

    def forget(self, start: int, end: int) -> None:
        """Forget the jumps in memory that is gone or shows something else."""
        sites = self.by_site if end - start > len(self.by_site) else range(start, end)
        for patch in {self.by_site[site] for site in sites if start <= site < end and site in self.by_site}:
            self._drop(patch)


def _is_there(read: Callable[[int, int], bytes], patch: SitePatch) -> bool:
    """Return whether memory has a jump, and with the bytes that it shares it leads where it should."""
    with contextlib.suppress(OSError):
        return all(read(address, len(data)) == data for address, data in (*patch.writes, patch.relied_on))
    return False


def _is_in(address: int, ranges: Iterable[tuple[int, int]]) -> bool:
    return any(start <= address < end for start, end in ranges)
