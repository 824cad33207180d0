"""Jumps as what is asked of the tracer: pieces that are written whole, with what memory must hold before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.ptrace.sitepatch import PatchSwitch, SitePatch
from dprobes.target.processmaps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dprobes.engines.inline.handlercode import PlacedJump
    from dprobes.engines.inline.sitegroups import PlannedSite
    from dprobes.engines.x86.patches.codebytes import CodeBytes, ModuleCode
    from dprobes.native.code import CodeSwitch

__all__ = ["site_patch"]


def site_patch(jump: PlacedJump, planned: Mapping[int, PlannedSite], module: ModuleCode, program: int) -> SitePatch:
    """
    Return the request for a jump to what is ``planned`` at instructions, by their addresses; its code is a program's.

    Of a jump that lies in two pages, the part in the second one comes first: until it is complete, a breakpoint stands
    where it begins.
    """
    plan = jump.placement.plan
    code = module.around(plan.start)
    assert code is not None
    start, end = min(plan.start, *jump.sites), plan.start + len(plan.raw)
    writes = [piece for write in jump.placement.writes for piece in _pieces(write.address, write.data)]
    # A mark for indirect branches before it loses its breakpoint.
    writes += [(site, _bytes(code.original, code, site, site + 1)) for site in jump.sites if site < plan.start]
    shared = plan.start + plan.written
    return SitePatch(
        tuple((*owner, site) for site in jump.sites for owner in planned[site].owners),
        start,
        _bytes(code.original, code, start, end),
        (shared, _bytes(code.current, code, shared, jump.placement.relied_on)),
        tuple(writes),
        tuple(_bytes(code.original, code, address, address + len(data)) for address, data in writes),
        jump.trampoline.moves,
        jump.trampoline.copies,
        jump.trampoline.code.end,
        plan.method.term,
        tuple(dict.fromkeys(group for site in jump.sites for group in planned[site].groups)),
        tuple(stop._replace(program=_ending(planned[stop.site])) for stop in jump.trampoline.stops),
        program,
        tuple(_switch(switch, site, planned[site]) for site, switch in jump.trampoline.switches),
        jump.trampoline.code.address,
        jump.placement.traps,
    )


def _ending(planned: PlannedSite) -> int:
    """Return the program whose handler may end so that the instruction does not follow: it is alone then."""
    return planned.pieces[0].program


def _switch(switch: CodeSwitch, site: int, planned: PlannedSite) -> PatchSwitch:
    owners = dict.fromkeys((planned.pieces[part].program, planned.pieces[part].probe, site) for part in switch.parts)
    return PatchSwitch(switch.address, switch.on, switch.off, switch.end, tuple(owners))


def _pieces(address: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    """Give the parts of bytes that lie in one page each, the last one first."""
    cut = PAGE_SIZE - address % PAGE_SIZE
    if cut < len(data):
        yield address + cut, bytes(data[cut:])
    yield address, bytes(data[:cut])


def _bytes(data: bytes | bytearray, code: CodeBytes, start: int, end: int) -> bytes:
    return bytes(data[start - code.start : end - code.start])
