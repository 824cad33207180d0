"""
By which jump each probepoint of a module would be probed, or why by a breakpoint: for people who look before they run.

Where the process will have its mappings nobody knows: a punned jump is one if the addresses that it leads to are free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.inline.handler_trials import Eligibility, obstacle_to_module, obstacle_to_program
from dprobes.platform.x86.patches.branch_targets import ModuleCode
from dprobes.platform.x86.patches.patch_placer import Placer, Shared
from dprobes.platform.x86.patches.patch_plans import Method, Refusal
from dprobes.platform.x86.patches.trampoline_space import AddressSpace
from dprobes.target.code.function_exits import ExitKind
from dprobes.target.process_maps import Growth, Mapping

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.resolve.probepoints import Probepoint, ResolvedModule
    from dprobes.rpn.rpn_program import Program

__all__ = ["note_of", "probe_notes"]

_ROOM = 512
"""Bytes of a trampoline, about."""
_SOMEWHERE = 0x7F00_0000_0000
_BEFORE_HEAP = 512 << 20
"""How far behind a program its heap begins: up to 1 GiB, or 32 MiB with kernels before Linux 6.9."""
"""Where a library may be."""


def probe_notes(program: Program, resolved: ResolvedModule) -> dict[int, str]:
    """Return how the probepoints of a module are probed, by their places among these; those that are about code."""
    probes = {number: probe for number, probe in enumerate(resolved.probepoints) if probe.is_in_code}
    whole = obstacle_to_program(program) or obstacle_to_module(resolved.architecture)
    eligibility = Eligibility(program)
    why = {number: whole or eligibility.obstacle_to(probe) for number, probe in probes.items()}
    places = {number: list(_places(probe)) for number, probe in probes.items() if why[number] is None}
    found = _methods(resolved, {place for mine in places.values() for place in mine}) if places else {}
    return {
        number: f"by a breakpoint: {why[number]}"
        if number not in places
        else note_of([found[p] for p in places[number]])
        for number in probes
    }


def _places(probe: Probepoint) -> Iterator[int]:
    """Give the link addresses of the instructions that get jumps."""
    if not probe.at_return:
        yield probe.instruction.address
        return
    yield from (leaving.address for leaving in probe.code.exits.exits if leaving.kind is ExitKind.RETURN)


def _methods(resolved: ResolvedModule, places: set[int]) -> dict[int, Method | str]:
    """Return by which method there is a jump at each place, or why by none."""
    module = resolved.module
    segments = module.elf.load_segments
    bias = _SOMEWHERE if module.elf.is_pie_or_shared else 0
    start, end = min(s.vaddr for s in segments) + bias, max(s.vaddr + s.memsz for s in segments) + bias
    own = Mapping(start & -4096, (end + 4095) & -4096, "r-xp", 0, 0, 1, str(module.path), deleted=False)
    code = ModuleCode.of(module, bias)
    space = AddressSpace([own], own.start, own.end, growth=Growth(own.end + _BEFORE_HEAP))
    found: dict[int, Method | str] = {}
    wanted = sorted((place + bias for place in places), reverse=True)
    for place, each in zip(wanted, Placer(code, space, _ROOM).place(wanted), strict=True):
        if isinstance(each, Refusal):
            found[place - bias] = each.reason
        else:
            placement = each.placement if isinstance(each, Shared) else each
            found[place - bias] = placement.plan.method
    return found


def note_of(found: Sequence[Method | str]) -> str:
    """Say how all places of a probepoint are probed."""
    reasons = [each for each in found if isinstance(each, str)]
    if reasons:
        return f"by a breakpoint: {reasons[0]}"
    methods = dict.fromkeys(each for each in found if isinstance(each, Method))
    words = " and ".join(f"a {method.value}" for method in methods)
    return f"by {words}" + (", if the addresses that it leads to are free" if Method.PUN in methods else "")
