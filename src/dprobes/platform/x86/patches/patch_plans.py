"""
Plans for a jump at an instruction, one method each, from its bytes and the control flow around it.

``patch_placer`` checks later whether the addresses of a plan are free. A method that is not possible returns the
reason, a clause with the subject "it".
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from dprobes.platform.x86.patches.branch_targets import kind_of, undisplaceable
from dprobes.target.code.machine_code import MAX_LENGTH, prepare_decoder
from dprobes.target.process_maps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from iced_x86 import Instruction

    from dprobes.platform.x86.patches.branch_targets import CodeBytes, ModuleCode

__all__ = ["JUMP_SIZE", "SHORT_JUMP_SIZE", "Method", "Plan", "Reach", "Refusal", "Site", "look_at"]

# Methods by which an instruction makes room for a jump.
#
# ::
#
#     method         bytes at the site                         displaced instructions
#     JUMP           e9 rel32 | rest of the instruction        the instruction, of five bytes or more
#     PUN            e9 low | upper half of rel32 = next bytes     the instruction, of any size
#     WINDOW         e9 rel32 | rest of the last instruction   several instructions
#     DEAD           e9 rel32, partly in dead bytes            the last instructions before bytes that never execute
#     SHORT          eb rel8; e9 rel32 in dead bytes nearby    the instruction
#     LEAD           as WINDOW, but from further ahead         some instructions before it, and the instruction
#
# A *punned jump* shares its last bytes with the following instruction, which stays as it is. So the upper bytes of its
# displacement are given, and restrict the addresses of its trampoline. Prefixes in front, which have no effect on the
# jump, make other bytes the upper ones. A breakpoint on those bytes, or the removal of another jump there, would change
# the target of the jump, and is not allowed.


JUMP_SIZE, SHORT_JUMP_SIZE = 5, 2
_PAGE = 4096


class Method(enum.Enum):
    """Method by which a jump gets its bytes. The value completes the phrase "probed by a ..."."""

    JUMP = "jump"
    PUN = "punned jump"
    WINDOW = "jump over several instructions"
    DEAD = "jump into dead bytes after it"
    SHORT = "short jump to dead bytes nearby"
    LEAD = "jump over the instructions before it"

    @property
    def term(self) -> str:
        """The name of the method in a summary."""
        return _TERMS[self]


_TERMS = {
    Method.JUMP: "jump",
    Method.PUN: "punned jump",
    Method.WINDOW: "window",
    Method.DEAD: "dead bytes",
    Method.SHORT: "short jump",
    Method.LEAD: "window before it",
}


class Reach(NamedTuple):
    """Range of targets of a jump with ``prefixes`` prefix bytes: from ``first`` to ``last`` (included)."""

    prefixes: int
    first: int
    last: int


class Plan(NamedTuple):
    """
    Plan for a jump that probes the instruction at ``site``; all addresses are addresses in the process.

    The jump displaces instructions with the bytes ``raw`` and the ``sizes`` from ``start`` on. ``start`` is the site,
    the instruction after an ``endbr64`` at the site, or an instruction before the site. The first ``written`` bytes
    change. The jump itself is at ``start``, or at the address ``padding``, and its target is in one of ``reaches``. If
    ``emulates_call`` is True, the displaced code pushes no return address on a shadow stack.
    """

    method: Method
    site: int
    start: int
    raw: bytes
    sizes: tuple[int, ...]
    written: int
    reaches: tuple[Reach, ...]
    padding: int | None = None
    emulates_call: bool = False

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The addresses of the displaced instructions."""
        return tuple(accumulate(self.sizes[:-1], initial=self.start))

    @property
    def landings(self) -> tuple[int, ...]:
        """
        Indices of the bytes in the jump's displacement at which displaced instructions began.

        A context that was saved at such an instruction may be resumed at any time. So each of these bytes must be the
        start of an instruction that traps.
        """
        inner = (address - self.start - 1 for address in self.boundaries[1:])
        return tuple(place for place in inner if place < JUMP_SIZE - 1)

    @property
    def lead(self) -> int:
        """The number of displaced bytes that are executed before the probe is hit."""
        return max(0, self.site - self.start)

    def end(self, reach: Reach) -> int:
        """
        Return the end address of the jump at the site with ``reach``'s prefixes.

        Bytes after the written ones must stay.
        """
        return self.start + (SHORT_JUMP_SIZE if self.padding is not None else reach.prefixes + JUMP_SIZE)

    @property
    def crosses_page(self) -> bool:
        """True if the change is in two pages, so that it may be left incomplete."""
        return self.start // _PAGE != (self.start + self.written - 1) // _PAGE


class Refusal(NamedTuple):
    """Reason why the instruction at ``site`` gets no jump, a clause with the subject "it"."""

    site: int
    reason: str


_LANDING_MARK = b"\xf3\x0f\x1e\xfa"
"""``endbr64``: with indirect branch tracking, the only valid target of indirect branches."""
_LOOKED_AT = JUMP_SIZE + 2 * MAX_LENGTH
_NEAR = 1 << 31
_ROOM_MAX = 1 << 16
"""Maximum size of a trampoline in bytes. The offset of the displaced code in it depends on the handler."""
_VAGUE = "its function has computed jumps"
_SHORT_BACK, _SHORT_ON = -128, 127


class Site:
    """Instruction to be probed by a jump, at ``start`` in ``code``, and the plans for that jump."""

    __slots__ = ("_decoder", "_module", "address", "changeable", "code", "first", "length", "place", "start")

    def __init__(self, module: ModuleCode, code: CodeBytes, address: int, start: int) -> None:
        from iced_x86 import Decoder

        self._module = module
        self.address = address
        self.code = code
        self.start = start
        self.place = start - code.start
        self._decoder = Decoder(64, code.original[self.place : self.place + _LOOKED_AT], ip=start)
        self.first = self._decoder.decode()
        self.length = self.first.len
        targets, link = module.flow.targets, start - module.bias
        self.changeable = self.length
        """The number of bytes of the instruction that can change: a branch may lead into it, after its prefix."""
        for size in range(1, min(self.length, JUMP_SIZE)):
            if link + size in targets:
                self.changeable = size
                break

    def raw(self, size: int) -> bytes:
        """Return the first ``size`` bytes of the instruction in the file."""
        return self.code.original[self.place : self.place + size]

    def jump(self) -> Plan | str:
        """Return the plan for a 5-byte jump in place of the instruction alone, or the reason against it."""
        if self.length < JUMP_SIZE:
            return f"it has {self.length} byte{'s' * (self.length > 1)}, a jump {JUMP_SIZE}"
        if self.changeable < JUMP_SIZE:
            return "a branch leads into it"
        return self._plan(Method.JUMP, (self.length,), self.first)

    def window(self, wanted: Collection[int]) -> Plan | str:
        """
        Return the plan that displaces the instruction and the following ones, or the reason against it.

        The displaced instructions, the window, must not include another ``wanted`` address. Dead bytes after a short
        instruction may have the jump instead.
        """
        targets, bias = self._module.flow.targets, self._module.bias
        if self.address - bias in self._module.flow.vague:
            return _VAGUE
        end, last, sizes = self.start + self.length, self.first, [self.length]
        limit = self.start + JUMP_SIZE
        for address in range(self.start + 1, min(end, limit)):
            if address - bias in targets:
                return "a branch leads into it"
        while True:
            kind = kind_of(last.code)
            if kind.is_system_call:
                return "a system call would come back into the middle of a window"
            if end >= limit:
                return self._plan(Method.WINDOW, tuple(sizes), last)
            if kind.calls:
                return "a call would come back into the middle of a window"
            if kind.leaves:
                return self._into_dead_bytes(end, tuple(sizes), last)
            for address in range(end, limit):
                if address - bias in targets:
                    return "a branch leads to the code after it"
                if address in wanted:
                    return "another probe follows too closely"
            last = self._decoder.decode()
            raw = self.code.original[end - self.code.start : end - self.code.start + last.len]
            if (
                undisplaceable(last, raw) is not None
                or raw == _LANDING_MARK
                or end - bias in self._module.flow.restartable
            ):
                return "the code after it cannot be executed elsewhere"
            end += last.len
            sizes.append(last.len)

    def lead(self, wanted: Collection[int]) -> Plan | str:
        """
        Return the plan for a window that begins before the instruction, or the reason against it.

        No branch may lead into that window, and no other ``wanted`` address may be in it.
        """
        targets, bias = self._module.flow.targets, self._module.bias
        if self.address - bias in self._module.flow.vague:
            return _VAGUE
        if self.start - bias in targets:
            return "a branch leads to it"
        kind = kind_of(self.first.code)
        if kind.is_system_call:
            return "a system call would come back into the middle of a window"
        end = limit = self.start + self.length
        if kind.leaves and not kind.calls:
            limit = self._module.flow.dead.end_at(end - bias) + bias
        sizes = [self.length]
        for instruction in reversed(self._preceding()):
            start = instruction.ip
            raw = self.code.original[start - self.code.start : instruction.next_ip - self.code.start]
            kind = kind_of(instruction.code)
            if (
                kind.leaves
                or kind.is_system_call
                or raw == _LANDING_MARK
                or undisplaceable(instruction, raw) is not None
            ):
                return "the code before it cannot be executed elsewhere"
            if start in wanted:
                return "another probe precedes too closely"
            sizes.insert(0, instruction.len)
            inside = range(start + 1, max(self.start, start + JUMP_SIZE))
            if any(address - bias in targets for address in inside if address < end):
                return "a branch leads to the code before it"
            if start + JUMP_SIZE <= limit:
                return self._plan(Method.LEAD, tuple(sizes), self.first, start=start)
            if start - bias in targets:
                return "a branch leads to the code before it"
        return "the code before it is unknown"

    def _preceding(self) -> list[Instruction]:
        """Return the instructions before this one in its function, at most as many as a jump can displace."""
        from iced_x86 import Decoder

        starts, link = self._module.flow.starts, self.start - self._module.bias
        i = bisect_right(starts, link) - 1
        if i < 0 or (start := starts[i] + self._module.bias) < self.code.start:
            return []
        found: list[Instruction] = []
        for instruction in Decoder(64, self.code.original[start - self.code.start : self.place], ip=start):
            if instruction.is_invalid:
                return []
            found = [*found[1 - JUMP_SIZE :], instruction]
        return found if found and found[-1].next_ip == self.start else []

    def puns(self) -> Plan | str:
        """
        Return the plan for a punned jump, whose last bytes are those of the following code, or the reason against one.

        The plan has one reach for each number of prefixes before the jump.
        """
        size = min(self.changeable, PAGE_SIZE - self.start % PAGE_SIZE, JUMP_SIZE - 1)
        reaches = []
        for prefixes in range(size):
            end = prefixes + JUMP_SIZE
            free = size - prefixes - 1
            fixed = self.code.current[self.place + prefixes + 1 + free : self.place + end]
            if len(fixed) < 4 - free:
                break
            distance = int.from_bytes(bytes(free) + fixed, "little", signed=True)
            first = self.start + end + distance
            if first > 0:
                reaches.append(Reach(prefixes, first, first + (1 << 8 * free) - 1))
        if not reaches:
            return "no jump that its bytes allow leads to an address"
        return self._plan(Method.PUN, (self.length,), self.first, written=size, reaches=tuple(reaches))

    def shorts(self) -> Iterator[Plan]:
        """Iterate over the plans for a short jump to dead bytes nearby that have room for a jump."""
        if self.start % PAGE_SIZE == PAGE_SIZE - 1 and self.changeable > 1:
            return
        flow, bias = self._module.flow, self._module.bias
        behind = self.start + SHORT_JUMP_SIZE - bias
        low, high = behind + _SHORT_BACK, behind + _SHORT_ON
        written = SHORT_JUMP_SIZE
        if self.changeable < SHORT_JUMP_SIZE:
            written = 1
            if self.place + 1 >= len(self.code.current):
                return
            distance = int.from_bytes(self.code.current[self.place + 1 : self.place + 2], "little", signed=True)
            low = high = behind + distance
        for dead_start, dead_end in flow.dead.between(low, high + JUMP_SIZE):
            for padding in range(max(low, dead_start), min(high, dead_end - JUMP_SIZE) + 1):
                address = padding + bias
                in_code = self.code.start <= address and address + JUMP_SIZE <= self.code.end
                in_page = address % PAGE_SIZE <= PAGE_SIZE - JUMP_SIZE
                if in_code and in_page and self.code.is_free(address, JUMP_SIZE):
                    yield self._plan(Method.SHORT, (self.length,), self.first, written=written, padding=address)
                    break

    def _into_dead_bytes(self, end: int, sizes: tuple[int, ...], last: Instruction) -> Plan | str:
        dead = self._module.flow.dead.end_at(end - self._module.bias) + self._module.bias
        if dead < self.start + JUMP_SIZE:
            return "too few dead bytes follow it"
        return self._plan(Method.DEAD, sizes, last)

    def _plan(
        self, method: Method, sizes: tuple[int, ...], last: Instruction, *, written: int = JUMP_SIZE,
        reaches: tuple[Reach, ...] = (), padding: int | None = None, start: int | None = None,
    ) -> Plan:  # fmt: skip
        start = self.start if start is None else start
        jump = start if padding is None else padding
        if not reaches:
            # The displaced code in the trampoline must reach every address of the module.
            middle, distance = jump + JUMP_SIZE, _NEAR - self._module.size - _ROOM_MAX
            reaches = (Reach(0, max(0, middle - distance), middle + distance),)
        return Plan(
            method,
            self.address,
            start,
            self.code.original[start - self.code.start : start - self.code.start + sum(sizes)],
            sizes,
            written,
            reaches,
            padding,
            kind_of(last.code).calls,
        )


def look_at(module: ModuleCode, address: int) -> Site | str:
    """Return the instruction at a run-time address as a site, or a reason against it: a clause about "it"."""
    prepare_decoder()
    code = module.around(address)
    if code is None:
        return "it is not in the code of the module"
    if address - module.bias in module.flow.restartable:
        return "it is in a restartable sequence, which must not be left"
    start = address
    place = address - code.start
    if code.original[place : place + len(_LANDING_MARK)] == _LANDING_MARK:
        start += len(_LANDING_MARK)
        if start >= code.end or start - module.bias in module.flow.targets:
            return "it must stay for indirect branches, and a branch leads to the code after it"
    site = Site(module, code, address, start)
    return undisplaceable(site.first, site.raw(site.length)) or site
