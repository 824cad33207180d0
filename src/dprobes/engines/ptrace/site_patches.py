"""
Jumps in an address space from probed instructions to handlers in the process, as data and as bytes.

A jump replaces breakpoints, which are recorded in ``Patches``: when the jump is removed, they can be written again. If
a jump relies on bytes of another one, both are removed together. Bytes are written while no thread of the address space
runs.

The kernel writes a uprobe's breakpoint even into a jump, because it checks only the file. When the uprobe is removed,
the kernel writes the file's byte: the rest of the jump is then not valid code.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right, insort
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from dprobes.platform.x86.instruction_relocation import CodeCopy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from dprobes.bpf.map_layouts import CallTable

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
A NOP of 64-bit code, which traps in 32-bit code.

In 32-bit code the prefix selects 16-bit addresses: the NOP is shorter, and UD2 follows. A jump has the same bytes in
both modes: a thread in 32-bit code that executes the jump reaches this NOP.
"""
TRAP_OF_32_BITS = 6
"""Offset of UD2 in ``OF_64_BITS`` in bytes."""


class NativeStop(NamedTuple):
    """
    Instruction in the engine's code at which a thread stops, so that the tracer handles its hit at ``site``.

    The instruction faults, or traps if ``is_trap``. The stack pointer then belongs to a trampoline's frame
    (``x86_operations``). With ``has_frame``, the frame has the other registers that the handler's code has changed.
    With ``has_flags``, it has all flags as PUSHFQ pushes them.

    With an ``exit_code``, the hit has been handled already: the handler of the probepoint ``probe`` of ``program`` has
    ended with that code.
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
    Switch at ``address`` in a trampoline. With the bytes ``on``, the handlers up to ``end`` run; ``off`` skips them.

    ``sites`` has the sites of these handlers.
    """

    address: int
    on: bytes
    off: bytes
    end: int
    sites: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class SitePatch:
    """
    Jump that replaces the breakpoints at ``sites``, (program, probepoint, address) each.

    * ``code`` has the file's bytes from ``start`` on: the displaced instructions, preceded by a mark for indirect
      branches (ENDBR) if there is one.
    * ``relied_on`` is an address and the bytes that memory must also have there, because a punned jump shares them.
    * ``writes`` has the bytes to be written, in order, and ``originals`` the file's bytes there. No write crosses a
      page boundary, so each is written whole or not at all.
    * ``moves`` maps addresses in the displaced code to the addresses at which a thread there continues.
    * ``copies`` describes the copies of the displaced instructions, in order; their code ends at ``end``.
    * ``method`` is the name of the jump's kind in a summary.
    * Of the jumps that have a group in common, either all or none are written.
    * ``stops`` has the instructions at which handlers leave a hit to the tracer.
    * The trampoline begins at ``begin``, in the memory of the program ``owner``. If it has handlers of several
      programs, ``switches`` skip the handlers of removed probepoints.
    * With ``traps``, a branch into the middle of the jump traps. Without it, no branch may lead there.
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

    def __reduce__(self) -> tuple[Callable[..., SitePatch], tuple[object, ...]]:
        """Pickle as plain tuples, several times faster than as objects: a message contains thousands."""
        copies, stops = tuple(map(tuple, self.copies)), tuple(map(tuple, self.stops))
        return _unpickled, (
            copies, stops, self.sites, self.start, self.code, self.relied_on, self.writes, self.originals, self.moves,
            self.end, self.method, self.groups, self.owner, self.switches, self.begin, self.traps,
        )  # fmt: skip

    @property
    def back(self) -> int:
        """Address after the original instructions, to which the displaced code jumps."""
        return self.start + len(self.code)

    @property
    def place(self) -> int | None:
        """Address of the displaced code, by which a jump is identified, or None if it has none."""
        return self.copies[0].copy if self.copies else None

    @property
    def users(self) -> frozenset[int]:
        """Programs whose memory the jump needs."""
        return self.programs | (frozenset() if self.owner is None else {self.owner})

    def only(self, sites: Iterable[tuple[int, int, int]]) -> SitePatch:
        """Return the jump with only those of its sites that are in ``sites``. A jump without switches keeps all."""
        present = set(sites)
        kept = tuple(site for site in self.sites if site in present)
        if not self.switches or len(kept) == len(self.sites):
            return self
        programs = {program for program, _, _ in kept}
        return replace(self, sites=kept, groups=tuple(group for group in self.groups if group[0] in programs))

    def switched(self) -> Iterator[tuple[int, bytes]]:
        """Iterate over (address, bytes) of the switches: on if the jump has one of their sites, otherwise off."""
        for switch in self.switches:
            yield switch.address, switch.off if set(self.sites).isdisjoint(switch.sites) else switch.on

    def code_of(self, program: int) -> list[tuple[int, int]]:
        """Return the ranges of code, (start, end) each, that only handlers of ``program`` need, after its switches."""
        return [
            (switch.address + len(switch.on), switch.end)
            for switch in self.switches
            if {number for number, _, _ in switch.sites} == {program}
        ]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of the probed instructions."""
        if len(self.sites) == 1:
            return (self.sites[0][2],)
        return tuple(dict.fromkeys([address for _, _, address in self.sites]))

    @property
    def probes(self) -> tuple[tuple[int, int], ...]:
        """Probepoints, (program, probepoint) each."""
        return tuple(dict.fromkeys((program, probe) for program, probe, _ in self.sites))

    @property
    def programs(self) -> frozenset[int]:
        """Programs whose handlers the jump leads to."""
        return frozenset(program for program, _, _ in self.sites)

    def way_on(self, address: int) -> int:
        """Return the address at which a thread continues that has not executed the instruction at ``address`` yet."""
        return next((copy for original, copy in self.moves if original == address), address)

    def copy_of(self, address: int) -> int | None:
        """
        Return the address of the copied instruction at which a thread continues after its hit was handled.

        ``address`` is the address of the probed instruction, or of the mark before it. Return None if there is no copy.
        """
        return next((each.copy for each in self.copies if each.exact and each.original >= address), None)

    def probes_at(self, address: int) -> set[tuple[int, int]]:
        """Return the probepoints at an address."""
        return {(program, probe) for program, probe, site in self.sites if site == address}

    def used_bytes(self) -> set[int]:
        """Return the addresses of the bytes that must not change: written, relied on, or displaced."""
        return {*self.relied_bytes(), *self.displaced_bytes(), *self.written_bytes()}

    def relied_bytes(self) -> range:
        """Return the addresses of the bytes that the jump includes but does not write."""
        first, shared = self.relied_on
        return range(first, first + len(shared))

    def displaced_bytes(self) -> range:
        """Return the addresses of the code of which copies are executed."""
        return range(self.start, self.start + len(self.code))

    def written_bytes(self) -> set[int]:
        """Return the addresses of the bytes that are written."""
        return {place for address, data in self.writes for place in range(address, address + len(data))}


def _unpickled(
    copies: tuple[tuple[int, int, bool], ...], stops: tuple[tuple[object, ...], ...], *fields: Any
) -> SitePatch:
    sites, start, code, relied_on, writes, originals, moves, end, method, groups, owner, switches, begin, traps = fields
    return SitePatch(
        sites, start, code, relied_on, writes, originals, moves, tuple(map(CodeCopy._make, copies)), end, method,
        groups, tuple(map(NativeStop._make, stops)), owner, switches, begin, traps,
    )  # fmt: skip


def without_jump(found: bytes, data: bytes, original: bytes) -> bytes | None:
    """
    Return the bytes ``found`` in memory, with the bytes of a jump replaced by the file's.

    ``data`` has the jump's bytes there, and ``original`` the file's. The breakpoint of a uprobe stays, because the
    kernel removes it. Return None if memory has any other byte, or ``found`` is too short.
    """
    if len(found) < len(data):
        return None
    triples = [*zip(found, data, original, strict=True)]
    if any(byte not in (mine, filed, _INT3) for byte, mine, filed in triples):
        return None
    return bytes(filed if byte == mine else byte for byte, mine, filed in triples)


class NativeMemory(NamedTuple):
    """
    Addresses of the memory for handlers in a process.

    ``page`` is the process page (``native.process_page``), which is private; together with the ``calls`` after it, it
    has ``own`` bytes. ``region`` is the mapping, of ``size`` bytes, of the client's file with the program's maps.
    ``others`` has mappings (address, size) that other programs use, too. The ``manifest`` lists all bytes that are
    written (``restorer_messages``).
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
        """Mappings of files, (address, size) each."""
        manifest = () if self.manifest is None else (self.manifest,)
        return (self.region, self.size), *self.others, *manifest


@dataclass(slots=True, eq=False)
class Patches:
    """Jumps of one address space, by the addresses of the probed instructions."""

    memories: dict[int, NativeMemory] = field(default_factory=dict)
    """Shared memory of each program, by its number."""
    by_site: dict[int, SitePatch] = field(default_factory=dict)
    code: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Ranges mapped for code, (start, end) each, by the keys of ``memories``."""
    fixups: dict[int, int] = field(default_factory=dict)
    """Address where a thread continues after a fault in the engine's code, by the address of the fault."""
    stops: dict[int, NativeStop] = field(default_factory=dict)
    """Instructions in the engine's code at which the tracer handles the hit, by their address."""
    displaced: dict[int, SitePatch] = field(default_factory=dict)
    """All jumps written so far, by the address of their displaced code: threads may still be in it."""
    starts: list[int] = field(default_factory=list)
    """Keys of ``displaced``, sorted."""
    known: dict[int, SitePatch] = field(default_factory=dict)
    """
    Jumps whose code is written, with all their sites, by the address of their displaced code. The latest is the last.

    The jump in memory may serve only some of these sites.
    """
    places: dict[int, list[int]] = field(default_factory=dict)
    """Keys of ``known`` by the addresses of probed instructions, oldest first."""
    users: dict[int, list[SitePatch]] = field(default_factory=dict)
    """Jumps that need a byte unchanged, by its address."""
    listed: dict[int, set[object]] = field(default_factory=dict)
    """Entries in the manifest of each memory, by its page: jumps and breakpoints as their bytes."""
    unlisted: set[int] = field(default_factory=set)
    """Pages of the memories whose manifests lack breakpoints."""
    occupied: int = 0
    """Number of times that another mapping occupied the addresses planned for code."""

    def begin_list(self, memory: NativeMemory) -> None:
        """Record that the manifest in newly mapped memory is empty, whatever was at its address before."""
        self.listed[memory.page] = set()
        self.unlisted.discard(memory.page)

    def learn(self, patches: Iterable[SitePatch]) -> None:
        """Add jumps whose code is in memory to those that can be written again."""
        for patch in patches:
            if patch.place is not None and patch.place not in self.known:  # it may be written again for fewer sites
                self.known[patch.place] = patch
                for site in patch.addresses:
                    self.places.setdefault(site, []).append(patch.place)

    def give_up(self, sites: Iterable[int]) -> None:
        """Forget all jumps at the addresses ``sites``, written or not, so that they are not written again."""
        self._unlearn({place for site in sites for place in self.places.get(site, ())})

    def known_at(self, sites: Collection[int] | None = None) -> list[SitePatch]:
        """Return the known jumps at ``sites``, or all if it is None, the latest first."""
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
        """
        Return the ranges of code, (start, end) each, that need the memory of the program ``number``.

        These are the program's own code, and parts of the code of jumps that serve several programs.
        """
        parts = [part for patch in self.known.values() for part in patch.code_of(number)]
        return [*self.code.get(number, ()), *parts]

    def write(self, memory: int, patch: SitePatch) -> None:
        """
        Set the switches in a jump's trampoline, then write the jump, through an open ``/proc/PID/mem``.

        If a write fails, restore the former bytes and raise OSError.
        """
        done: list[tuple[int, bytes]] = []
        try:
            for address, data in (*patch.switched(), *patch.writes):
                before = os.pread(memory, len(data), address)
                done.append((address, before))
                os.pwrite(memory, data, address)
        except OSError:
            for address, before in reversed(done):
                with contextlib.suppress(OSError):
                    os.pwrite(memory, before, address)
            raise
        for former in {self.by_site[site] for site in patch.addresses if site in self.by_site}:
            self._drop(former)  # the new jump covers more sites
        self._note(patch)
        if patch.copies:
            place = patch.copies[0].copy
            if place not in self.displaced:
                insort(self.starts, place)
            self.displaced[place] = patch
        self.stops.update((stop.place, stop) for stop in patch.stops)

    def is_there(self, memory: int, site: int) -> bool:
        """Return whether ``site`` has a jump and memory contains all bytes written for it."""
        patch = self.by_site.get(site)
        return patch is not None and all(os.pread(memory, len(data), at) == data for at, data in patch.writes)

    def _note(self, patch: SitePatch) -> None:
        self.by_site.update(dict.fromkeys(patch.addresses, patch))
        for place in patch.used_bytes():
            self.users.setdefault(place, []).append(patch)

    def restore(self, memory: int, sites: Iterable[int]) -> set[int]:
        """
        Restore the file's bytes at these places, wherever memory still has the jump.

        Return all places that have lost their jump: several may have shared one.
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
        Rewrite the bytes of jumps that uprobes have replaced; return whether there were any.

        The kernel then does not write these bytes when the uprobe is removed. Each byte is written separately, because
        threads may run meanwhile. A uprobe on an ENDBR does no harm. Where memory has the file's bytes, there is no
        jump to rewrite.
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
        """Return the punned jumps whose target depends on bytes that ``patch`` has written."""
        written = patch.written_bytes()
        others = {other for place in written for other in self.users.get(place, ()) if other is not patch}
        return {other for other in others if not written.isdisjoint(other.relied_bytes())}

    def near(self, start: int, end: int) -> set[SitePatch]:
        """Return the jumps that need bytes from ``start`` to ``end`` (excluded) unchanged."""
        return {patch for place in range(start, end) for patch in self.users.get(place, ())}

    def relying_on(self, address: int) -> list[int]:
        """Return the probed addresses of the jumps that need the byte at ``address`` unchanged."""
        return [site for patch in self.near(address, address + 1) for site in patch.addresses]

    def bound_to(self, sites: Iterable[int]) -> list[int]:
        """Return those of ``sites`` with jumps, and the sites of all other jumps in the same groups."""
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
        """
        Return a context manager during which the file's bytes replace the jump at ``site``, if there is one.

        ``memory`` is a descriptor of the process's memory. Jumps that share bytes with it are replaced, too.
        """
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
        """Replace the bytes of jumps in ``data``, which was read at ``address``, by the file's, in place."""
        end = address + len(data)
        for patch in self.near(address, end):
            for (start, written), original in zip(patch.writes, patch.originals, strict=True):
                first, last = max(start, address), min(start + len(written), end)
                if first < last:
                    data[first - address : last - address] = original[first - start : last - start]

    def originals(self) -> dict[int, int]:
        """Return the file's bytes by their addresses, where jumps are."""
        return {
            start + place: byte
            for patch in self.by_site.values()
            for (start, _), data in zip(patch.writes, patch.originals, strict=True)
            for place, byte in enumerate(data)
        }

    def ranges(self) -> list[tuple[int, int]]:
        """Return the ranges mapped for handlers, (start, end) each."""
        own = [(memory.page, memory.page + memory.own) for memory in self.memories.values()]
        shared = [(at, at + size) for memory in self.memories.values() for at, size in memory.shared]
        return [*self.code_ranges(), *own, *shared]

    def code_ranges(self) -> list[tuple[int, int]]:
        """Return the ranges mapped for code, (start, end) each."""
        return [each for ranges in self.code.values() for each in ranges]

    def original_of(self, pc: int) -> tuple[SitePatch, CodeCopy] | None:
        """Return the jump and the copied instruction at ``pc``, or None if that is not in displaced code."""
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
        Return the jump in whose code a copied instruction begins at ``pc``, and that instruction's original address.

        Return None between two instructions, outside displaced code, and at the first instruction, which the thread had
        reached before the jump.
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
        """Return whether ``pc`` is in the engine's code, or part of a jump."""
        if any(start <= pc < end for start, end in self.code_ranges()):
            return True
        return any(
            pc == address and pc not in patch.displaced_bytes()
            for patch in self.users.get(pc, ())
            for address, _ in patch.writes
        )

    def way_on(self, address: int) -> int:
        """Return the address of the copy of the instruction at ``address``, or ``address`` if it is not displaced."""
        moved = (patch.way_on(address) for patch in self.near(address, address + 1))
        return next((place for place in moved if place != address), address)

    def copy_for_child(
        self, memory: int, read: Callable[[int, int], bytes], is_mapped: Callable[[int], bool]
    ) -> Patches:
        """
        Return the jumps of a forked child, and remove those in its memory that have been removed in the parent.

        The kernel copied the memory before this call: later mappings and writes are not in the copy. ``read`` reads the
        child's memory, and ``is_mapped`` returns whether an address is mapped there.
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
                os.pwrite(memory, data, address)  # a program may have been removed meanwhile
        return copy

    def is_used(self, memory: int, number: int) -> bool:
        """Return whether memory has a jump to code of the program ``number``, registered or left over."""

        def read(address: int, size: int) -> bytes:
            return os.pread(memory, size, address)

        former = (patch for patch in self.displaced.values() if number in patch.users)
        return any(number in patch.users for patch in self.by_site.values()) or any(
            _is_there(read, patch) for patch in former
        )

    def forget_program(self, number: int) -> None:
        """Forget the memory of a program after it was unmapped: its addresses may be used by other mappings later."""
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
        """Forget the jumps in memory that was unmapped or replaced."""
        sites = self.by_site if end - start > len(self.by_site) else range(start, end)
        for patch in {self.by_site[site] for site in sites if start <= site < end and site in self.by_site}:
            self._drop(patch)


def _is_there(read: Callable[[int, int], bytes], patch: SitePatch) -> bool:
    """Return whether memory has a jump, including the shared bytes that its target depends on."""
    with contextlib.suppress(OSError):
        return all(read(address, len(data)) == data for address, data in (*patch.writes, patch.relied_on))
    return False


def _is_in(address: int, ranges: Iterable[tuple[int, int]]) -> bool:
    return any(start <= address < end for start, end in ranges)
