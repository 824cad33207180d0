"""
Plans of programs for one module of a process, and the instructions that they must plan together.

A jump over instructions that several programs probe leads to the handlers of all of them. A jump close to that of
another program may need the same bytes. So the last program that is inserted plans for all programs with instructions
nearby, in memory of its own. When a program ends, the tracer writes the former jumps of the others again, or switches
the ended program's handlers off.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dprobes.bpf.bpf_instructions import Class, Helper, Jump
from dprobes.engines.inline.handler_pieces import SiteHandler, joined
from dprobes.engines.inline.handler_trials import Trial
from dprobes.engines.ptrace.site_patches import PatchSwitch, SitePatch
from dprobes.native.handler_analysis import footprint
from dprobes.target.process_maps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from collections.abc import Mapping as MappingOf

    from dprobes.bpf.bpf_assembler import Assembled
    from dprobes.engines.inline.handler_code import CodeWriter, PlacedJump
    from dprobes.engines.inline.handler_pieces import PlannedSite
    from dprobes.engines.ptrace.site_patches import NativeStop
    from dprobes.native.generated_code import CodeSwitch
    from dprobes.native.handler_analysis import Footprint
    from dprobes.platform.x86.patches.branch_targets import CodeBytes, ModuleCode
    from dprobes.target.process_maps import Mapping as MemoryMapping

__all__ = [
    "ModulePlan",
    "PlannedJumps",
    "has_device_memory",
    "plan_alone",
    "plan_together",
    "process_trials",
    "site_patch",
    "sites_together",
]


def site_patch(jump: PlacedJump, planned: Mapping[int, PlannedSite], module: ModuleCode, program: int) -> SitePatch:
    """
    Return the request to the tracer to write a planned jump, with its trampoline, to a process.

    ``planned`` has the handlers of each instruction, by address; the trampoline is code of the program with the number
    ``program``. If a jump crosses a page boundary, the second page is written first. Until the jump is complete, a
    breakpoint is at its beginning.
    """
    plan = jump.placement.plan
    code = module.around(plan.start)
    assert code is not None
    start, end = min(plan.start, *jump.sites), plan.start + len(plan.raw)
    writes = [piece for write in jump.placement.writes for piece in _pieces(write.address, write.data)]
    # An ``endbr64`` before the jump loses its breakpoint.
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
        _stops_of(jump.trampoline.stops, planned),
        program,
        tuple(_switch(switch, site, planned[site]) for site, switch in jump.trampoline.switches),
        jump.trampoline.code.address,
        jump.placement.traps,
    )


def _stops_of(stops: Sequence[NativeStop], planned: Mapping[int, PlannedSite]) -> tuple[NativeStop, ...]:
    """
    Return ``stops`` with the number of the program whose handler ends with ``skip`` or ``exit``, if one does.

    Such a handler is the only one at its instruction.
    """
    if not any(stop.exit_code for stop in stops):
        return tuple(stops)
    return tuple([stop._replace(program=planned[stop.site].pieces[0].program) for stop in stops])


def _switch(switch: CodeSwitch, site: int, planned: PlannedSite) -> PatchSwitch:
    owners = dict.fromkeys((planned.pieces[part].program, planned.pieces[part].probe, site) for part in switch.parts)
    return PatchSwitch(switch.address, switch.on, switch.off, switch.end, tuple(owners))


def _pieces(address: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    """Iterate over the parts of bytes that lie in one page each, the last one first."""
    cut = PAGE_SIZE - address % PAGE_SIZE
    if cut < len(data):
        yield address + cut, bytes(data[cut:])
    yield address, bytes(data[:cut])


def _bytes(data: bytes | bytearray, code: CodeBytes, start: int, end: int) -> bytes:
    return bytes(data[start - code.start : end - code.start])


# Trials in one process: there are none if it has mapped memory of devices.
#
# A read of such memory may change it, so a trial must not read it. ``smaps`` shows which mappings are of this kind;
# only files in some directories can have them.


_DEVICES = "its instruction may fault, which cannot be tested where device memory is mapped"

_OTHERS = "its handler may stop the thread or skip the function, and it is there for another probepoint as well"

_CHANGES = "its instruction may fault, which may depend on what another handler there changes"

_CHECKED = "its access is checked, and another program has a probepoint nearby"

_DISTURBS = "it is there for another probepoint as well, whose handler changes registers that this one looks at"

_PLACES = ("/dev/", "/sys/", "/proc/", "/dmabuf", "anon_inode:")
_MEMORY = ("/dev/shm/", "/dev/zero", "/dev/hugepages/")  # noqa: S108 - nothing is opened there
_FLAGS = frozenset(("io", "pf"))
"""Memory-mapped input and output, and pages without struct page (Documentation/filesystems/proc.rst, VmFlags)."""


def process_trials(
    sites: MappingOf[int, PlannedSite], pid: int, mappings: Iterable[MemoryMapping]
) -> dict[int, Trial | str]:
    """
    Return the trial before the handlers of each probed instruction, by its run-time address.

    The value is instead the reason (a clause) if the handlers cannot run in the process. Instructions that need neither
    are omitted.
    """
    found: dict[int, Trial | str] = {}
    for address, planned in sites.items():
        pieces = planned.pieces
        trial = next((piece.trial for piece in pieces if piece.trial is not None), None)
        ending = next((piece.probe for piece in pieces if piece.diverts), None)
        if ending is not None and len(pieces) > 1:
            found[address] = _OTHERS
        elif len(pieces) > 1 and any(piece.guard is not None for piece in pieces):
            found[address] = _CHECKED
        elif len(pieces) > 1 and _disturbs([footprint(piece.assembled) for piece in pieces]):
            found[address] = _DISTURBS
        elif trial is not None and len(pieces) > 1 and any(_may_change(piece.assembled) for piece in pieces):
            found[address] = _CHANGES
        elif trial is not None or ending is not None:
            found[address] = (trial or Trial(b""))._replace(ends=ending)
    tried = [address for address, trial in found.items() if isinstance(trial, Trial) and trial.tries]
    return found | dict.fromkeys(tried, _DEVICES) if tried and has_device_memory(pid, mappings) else found


def _disturbs(handlers: Sequence[Footprint]) -> bool:
    """Return True if one of several handlers reads a register that another one changes (``probe_hits``)."""
    changed: set[int] = set()
    for each in handlers:
        if not changed.isdisjoint(each.reads):
            return True
        changed |= each.writes
    return False


def _may_change(assembled: Assembled) -> bool:
    """Return True if a handler may change registers or memory of the program."""
    writing = Class.JMP | Jump.CALL, Helper.PROBE_WRITE_USER
    return bool(footprint(assembled).writes) or any((insn.opcode, insn.imm) == writing for insn in assembled.code)


def has_device_memory(pid: int, mappings: Iterable[MemoryMapping]) -> bool:
    """Return True if a process has mapped memory of a device, or if its ``smaps`` cannot be read."""
    suspected = {m.start for m in mappings if m.path.startswith(_PLACES) and not m.path.startswith(_MEMORY)}
    if not suspected:
        return False
    try:
        text = Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return True
    return any(_flags_of(text, start) & _FLAGS for start in suspected)


def _flags_of(text: str, start: int) -> frozenset[str]:
    """Return the flags of the mapping that begins at an address, from the text of ``smaps``."""
    _, found, rest = f"\n{text}".partition(f"\n{start:08x}-")
    _, _, flags = rest.partition("\nVmFlags:")
    return frozenset(flags.partition("\n")[0].split()) if found else frozenset()


NEAR = 32
"""Distance in bytes up to which the jumps of two instructions may conflict; displaced code is shorter."""


class ModulePlan(NamedTuple):
    """
    Plan of a program for a module of a process: ``planned`` sites by address, and the ``writer``.

    ``page`` identifies the process (``PatchSites``), and ``rank`` is the program's position in the order of insertion.
    """

    program: int
    rank: int
    page: int
    planned: Mapping[int, PlannedSite]
    writer: CodeWriter


class PlannedJumps(NamedTuple):
    """Planned jumps, and the reasons why some instructions have none."""

    jumps: list[PlacedJump]
    patches: list[SitePatch]
    refused: dict[int, str]


def sites_together(wanted: Iterable[int], plans: Sequence[ModulePlan]) -> frozenset[int]:
    """Return the addresses of instructions near ``wanted`` ones if several programs have some there; else none."""
    if len(plans) == 1:
        return frozenset()
    owners: dict[int, set[int]] = {}
    bound: dict[int, set[int]] = {}
    for plan in plans:
        for address, site in plan.planned.items():
            owners.setdefault(address, set()).add(plan.program)
            bound.setdefault(address, set()).update(site.bound)
    order = sorted(owners)
    seen, together = set[int](), set[int]()
    for first in wanted:
        if first in seen:
            continue
        members, waiting = set[int](), [first]
        while waiting:
            address = waiting.pop()
            if address in members:
                continue
            members.add(address)
            waiting += order[bisect_left(order, address - NEAR) : bisect_right(order, address + NEAR)]
            waiting += bound[address]
        if len({program for address in members for program in owners[address]}) > 1:
            together |= members
        seen |= members
    return frozenset(together)


def plan_alone(
    plan: ModulePlan,
    addresses: Collection[int],
    others: Collection[int],
    pid: int,
    mappings: Iterable[MemoryMapping],
) -> PlannedJumps:
    """Plan jumps of one program; ``others`` are instructions with breakpoints, which no jump should displace."""
    sites = {address: plan.planned[address] for address in addresses}
    handlers = {
        a: [SiteHandler(piece.code, piece.probe, None, piece.guard) for piece in site.pieces]
        for a, site in sites.items()
    }
    return _planned(plan, plan.writer, plan.planned, handlers, others, process_trials(sites, pid, mappings))


def plan_together(
    plans: Sequence[ModulePlan],
    mine: ModulePlan,
    addresses: Collection[int],
    others: Collection[int],
    pid: int,
    mappings: Iterable[MemoryMapping],
) -> PlannedJumps:
    """Plan jumps of several programs in the memory of one of them, whose plan is ``mine``."""
    in_order = sorted(plans, key=lambda plan: plan.rank)
    around = {plan.program: plan.writer.around for plan in plans}
    sites = {
        address: joined([plan.planned[address] for plan in in_order if address in plan.planned])
        for address in addresses
    }
    handlers = {
        address: [SiteHandler(piece.code, piece.probe, around[piece.program]) for piece in site.pieces]
        for address, site in sites.items()
    }
    trials = process_trials(sites, pid, mappings)
    for address, site in sites.items():
        if any(piece.guard is not None for piece in site.pieces):
            trials[address] = _CHECKED  # the code of a guard has no switch
    return _planned(mine, mine.writer.anew(), sites, handlers, others, trials)


def _planned(
    plan: ModulePlan,
    writer: CodeWriter,
    sites: Mapping[int, PlannedSite],
    handlers: Mapping[int, Sequence[SiteHandler]],
    others: Collection[int],
    trials: Mapping[int, Trial | str],
) -> PlannedJumps:
    bound = [sites[address].bound for address in handlers if sites[address].bound]
    jumps, refused = writer.place(handlers, _merged(bound), others, trials)
    return PlannedJumps(jumps, [site_patch(jump, sites, writer.module, plan.program) for jump in jumps], refused)


def _merged(groups: Iterable[frozenset[int]]) -> list[frozenset[int]]:
    """Return disjoint groups: those with common elements are merged."""
    found: dict[int, frozenset[int]] = {}
    for group in groups:
        whole = group.union(*(found[address] for address in group if address in found))
        found |= dict.fromkeys(whole, whole)
    return list(dict.fromkeys(found.values()))
