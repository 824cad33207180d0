"""
The code of handlers for one process: routines, and a trampoline for each probepoint, where there is room for them.

::

    handler in eBPF ─► its trampoline's size ─► a place for it near the instruction ─► machine code for that place
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.inline.eligibility import obstacle_in_process
from dprobes.engines.x86.patches.displaced import displaced
from dprobes.engines.x86.patches.placer import Placement, Placer, Shared
from dprobes.engines.x86.patches.plans import Method, Refusal
from dprobes.lazynamedtuple import NamedTuple
from dprobes.native.code import Surroundings
from dprobes.native.x86.runtime import make_runtime
from dprobes.native.x86.trampoline import make_trampoline
from dprobes.target.processmaps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.bpf.layout import MapName
    from dprobes.engines.x86.patches.addressspace import AddressSpace
    from dprobes.engines.x86.patches.codebytes import ModuleCode
    from dprobes.native.code import NativeCode
    from dprobes.native.faults import Fixup
    from dprobes.native.memory import MapPlace
    from dprobes.native.routines.hashtable import TableShape
    from dprobes.native.routines.ring import RingShape
    from dprobes.native.runtime import ProcessFacts, Runtime
    from dprobes.native.x86.assembler import X86Assembler

__all__ = ["CodeWriter", "PlacedHandler"]

_METHODS = (Method.JUMP, Method.PUN, Method.DEAD)
"""Where nothing but the probed instruction is displaced: so no thread is ever in the middle of what changes."""

_SLACK = 64
"""Bytes by which the size of code may differ between two addresses, since numbers have short forms."""

_REACH = 1 << 30


class PlacedHandler(NamedTuple):
    """A trampoline with its code, and the jump that leads to it."""

    placement: Placement
    code: NativeCode


class CodeWriter:
    """Write the code for the probepoints in one module of a process."""

    def __init__(
        self,
        module: ModuleCode,
        space: AddressSpace,
        facts: ProcessFacts,
        maps: Mapping[MapName, MapPlace],
        rings: RingShape,
        tables: Mapping[MapName, TableShape],
    ) -> None:
        self.module = module
        self.space = space
        self._facts = facts
        self._maps = maps
        self._rings = rings
        self._tables = tables
        self._runtime: Runtime | None = None
        self._mapped: set[int] = set()
        self._placers: dict[int, Placer] = {}

    def new_regions(self) -> list[tuple[int, int]]:
        """Return (start, end) of all that is to be mapped, and was not returned before."""
        wanted = {page for start, end in self.space.regions() for page in range(start, end, PAGE_SIZE)}
        runs: list[tuple[int, int]] = []
        for page in sorted(wanted - self._mapped):
            if runs and runs[-1][1] == page:
                runs[-1] = runs[-1][0], page + PAGE_SIZE
            else:
                runs.append((page, page + PAGE_SIZE))
        self._mapped |= wanted
        return runs

    @property
    def runtime(self) -> Runtime | None:
        """The routines, once there is a handler."""
        return self._runtime

    @property
    def fixups(self) -> tuple[Fixup, ...]:
        """Where threads go on that fault in them."""
        return () if self._runtime is None else self._runtime.code.fixups

    def place(self, site: int, raw: bytes, handlers: Sequence[Assembled]) -> PlacedHandler | str:
        """Return the handlers of the instruction at ``site``, or why there is no place for them."""
        problems = (obstacle_in_process(assembled, self._facts) for assembled in handlers)
        if (problem := next(filter(None, problems), None)) is not None:
            return problem
        if self._runtime is None and (problem := self._place_runtime(site)) is not None:
            return problem
        assert self._runtime is not None
        around = Surroundings(
            self._maps,
            self._runtime.routines,
            self._runtime.map_routines,
            self._facts.has_rdpid,
            self._rings,
            self._facts.life_mark,
        )
        near = self._runtime.code.address
        room = len(self._code(near, site, raw, handlers, around).code) + _SLACK
        self._placers[site] = placer = Placer(self.module, self.space, room)
        (found,) = placer.place([site], windows_first=False)
        if isinstance(found, Refusal):
            return found.reason
        if isinstance(found, Shared):
            return "it is displaced for another probe"
        plan = found.plan
        if plan.method not in _METHODS or plan.start != site or len(plan.sizes) > 1:
            placer.remove(found)
            return f"it can only be probed by a {plan.method.value}"
        if plan.crosses_page:  # half of it could be written when the tracer is killed
            placer.remove(found)
            return "its jump would lie in two pages"
        return PlacedHandler(found, self._code(found.trampoline, site, plan.raw, handlers, around))

    def remove(self, placed: PlacedHandler) -> None:
        """Give up what was placed, and not written."""
        self._placers.pop(placed.placement.plan.site).remove(placed.placement)

    def _place_runtime(self, site: int) -> str | None:
        facts, rings, tables = self._facts, self._rings, self._tables
        size = len(make_runtime(site, facts, rings, tables).code.code) + _SLACK
        address = self.space.allocate(max(0, site - _REACH), site + _REACH, size)
        if address is None:
            return "no memory near it is free"
        self._runtime = make_runtime(address, facts, rings, tables)
        return None

    @staticmethod
    def _code(address: int, site: int, raw: bytes, handlers: Sequence[Assembled], around: Surroundings) -> NativeCode:
        def write_rest(asm: X86Assembler) -> None:
            copy = displaced(raw, site, asm.here)
            assert copy is not None, "the trampoline is near the instruction"
            asm.raw(copy.code)

        return make_trampoline(address, site, handlers, around, write_rest)
