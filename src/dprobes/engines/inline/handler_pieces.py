"""
eBPF code that runs for a probepoint in the probed process, as pieces: one for each instruction at which code runs.

::

    a probepoint before an instruction   its handler there
    a probepoint at a return             its handler at each return instruction, on the state after that; if it reads
                                         the entry of the call, also code that keeps the entry, at the function's start

A jump that may be a tail call has no piece: the tracer waits for the return of the called function. If a function is
left only by such jumps, it has only the piece that keeps the entry, if the handler reads the entry.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from dprobes.arch import architecture
from dprobes.bpf.bpf_instructions import Class, Helper, Jump
from dprobes.bpf.lower import Abilities, LoopForm, Request, is_supported, lower
from dprobes.bpf.lower.hits.call_entries import entry_program
from dprobes.bpf.lower.hosts.handler_host import Host
from dprobes.bpf.lower.lowering_request import KeptEntry, Placement
from dprobes.bpf.map_layouts import CallTable
from dprobes.engines.inline.access_guards import guard_of
from dprobes.engines.inline.handler_hits import STATE_MAX, HandlerMaps
from dprobes.engines.inline.handler_trials import (
    Eligibility,
    obstacle_to_module,
    obstacle_to_program,
    trial_before,
)
from dprobes.engines.inline.shared_state import PROBES_MAX
from dprobes.errors import NotSupportedError
from dprobes.native.handler_analysis import trimmed
from dprobes.record.log_record import Item
from dprobes.rpn.instruction_set import OperandKind
from dprobes.rpn.program_needs import entry_registers, executed_instructions
from dprobes.target.code.function_exits import ExitKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dprobes.arch import Architecture
    from dprobes.bpf.bpf_assembler import Assembled
    from dprobes.bpf.bpf_instructions import Insn
    from dprobes.bpf.lower.lowering_request import Lowered
    from dprobes.engines.inline.access_guards import AccessGuard
    from dprobes.engines.inline.handler_trials import Trial
    from dprobes.engines.ptrace.client.site_answers import CompiledSite
    from dprobes.native.generated_code import Surroundings
    from dprobes.resolve.local_module import ResolvedProgram
    from dprobes.resolve.probepoints import Probepoint
    from dprobes.rpn.instruction_encoding import CodeImage
    from dprobes.rpn.rpn_program import ProbeDefinition, Program
    from dprobes.vm import Point

__all__ = [
    "HandlerCode",
    "HandlerFamily",
    "NumberedCode",
    "Order",
    "Piece",
    "PieceWriter",
    "PlannedSite",
    "SiteGroup",
    "SiteHandler",
    "call_table_of",
    "handler_codes",
    "joined",
    "obstacle_to_all",
    "planned_sites",
    "site_groups",
]

_SAMPLES = 3
_ELSEWHERE = 0x12345


@dataclass(frozen=True, slots=True, eq=False)
class NumberedCode:
    """
    Code for the probepoint ``number``, and the immediates that depend linearly on the number: (index, factor) each.

    Without such immediates, the code is that of one probepoint.

    A handler refers to its probepoint only by numbers that grow with the probepoint's: addresses of its counters, and
    numbers in entries of a ring. The first compiled handlers show which immediates these are. If anything else differs,
    every handler is compiled.
    """

    assembled: Assembled
    number: int
    places: tuple[tuple[int, int], ...] = ()

    @classmethod
    def learnt(cls, samples: Sequence[tuple[int, Assembled]]) -> NumberedCode | None:
        """Return the common code of all ``samples``, (number, code) each; None if they differ in anything else."""
        (first, code), (second, other), *rest = samples
        if (code.maps, code.functions) != (other.maps, other.functions) or len(code.code) != len(other.code):
            return None
        places = []
        for index, (a, b) in enumerate(zip(code.code, other.code, strict=True)):
            if a != b:
                growth, remainder = divmod(b.imm - a.imm, second - first)
                if remainder or a != b._replace(imm=a.imm):
                    return None
                places.append((index, growth))
        found = cls(code, first, tuple(places))
        return found if all(found.of(number).code == each.code for number, each in rest) else None

    def of(self, number: int) -> Assembled:
        """Return the code with the immediates for the probepoint ``number``."""
        if not self.places or number == self.number:
            return self.assembled
        code: list[Insn] = list(self.assembled.code)
        for index, growth in self.places:
            insn = code[index]
            code[index] = insn._replace(imm=insn.imm + growth * (number - self.number))
        return self.assembled._replace(code=tuple(code))


class SiteHandler(NamedTuple):
    """
    Handler of an instruction: its code and the number of its probepoint, and the surroundings of its code.

    The surroundings are None for those of the writer's program. A handler with a guard is the only one there.
    """

    code: NumberedCode
    number: int
    around: Surroundings | None = None
    guard: AccessGuard | None = None

    @property
    def assembled(self) -> Assembled:
        """The code, with the number of its probepoint."""
        return self.code.of(self.number)


class HandlerFamily:
    """Handlers with the same instructions, which may differ only in the numbers of their probepoints."""

    def __init__(self) -> None:
        self._samples: list[tuple[int, Assembled]] = []
        self._starts: list[int] = []
        self._numbered: NumberedCode | None = None
        self._is_settled = False

    def handler(self, number: int, start: int, compiled: Callable[[int, int], Assembled]) -> NumberedCode:
        """
        Return code for a probepoint, whose handler starts at byte ``start`` of the encoded program.

        ``compiled`` compiles the handler at a start, its first argument, for an address that is higher by ``distance``
        bytes, its second argument.
        """
        if self._numbered is not None:
            return self._numbered
        made = compiled(start, 0)
        if not self._is_settled:
            if all(number != known for known, _ in self._samples):
                self._samples.append((number, made))
                self._starts.append(start)
            if len(self._samples) == _SAMPLES:
                self._is_settled = True
                # The code must not depend on its address, nor on the handler's place in the encoded program.
                if made.code == compiled(start, _ELSEWHERE).code == compiled(self._starts[0], 0).code:
                    self._numbered = NumberedCode.learnt(self._samples)
                self._samples = []
        return NumberedCode(made, number)


class _Form(NamedTuple):
    """
    Place of a handler, and what its code depends on besides its content: items of ``Request``.

    ``link`` is None for the address of the probepoint's instruction.
    """

    placement: Placement = Placement.BREAKPOINT
    return_bytes: int = 0
    link: int | None = None
    entry: KeptEntry | None = None
    diverts: bool = False


_NAME = "x86_64"
_RET_NUMBER = 0xC2
ABILITIES = Abilities(
    LoopForm.MAY_GOTO,
    sleepable=False,
    writes_memory=True,
    writes_registers=True,
    small_states=True,
    verified=False,
    polled=True,
    named_later=True,
    copies_stacks=True,
)
"""Abilities that handlers in the process are compiled for."""


class Order(enum.IntEnum):
    """Order in which pieces of one instruction run: the tracer's order at a breakpoint."""

    ENTRY = 0
    HANDLER = 1
    RETURN = 2


class Piece(NamedTuple):
    """
    Code that runs for a probepoint at the instruction with the link address ``address`` and the bytes ``raw``.

    With a ``trial``, the piece runs only if the trial shows that the instruction will complete. ``diverts`` is True if
    the handler may end with ``skip`` or ``exit``, after which the instruction is not executed. With a ``guard``, the
    piece runs only if the instruction accesses certain memory. ``program`` is the number of the program, set at its
    insertion.
    """

    order: Order
    probe: int
    address: int
    raw: bytes
    code: NumberedCode
    trial: Trial | None = None
    diverts: bool = False
    guard: AccessGuard | None = None
    program: int = 0

    @property
    def assembled(self) -> Assembled:
        """The code, with the numbers of its probepoint."""
        return self.code.of(self.probe)


def call_table_of(program: Program) -> CallTable | None:
    """Return the table in which a program keeps the entries of calls; None if it needs none."""
    kept = (_kept(program, definition) for definition in program.definitions)
    counts = [len(entry.registers) for entry in kept if entry is not None]
    return CallTable.of(max(counts)) if counts else None


class PieceWriter:
    """
    Writer of pieces for the probepoints of one program; ``items`` are the header items of its records.

    ``why_not`` is the reason why no handler of the program can run in a process; None: there is none.
    """

    def __init__(self, program: Program, items: Item, why_not: str | None = None) -> None:
        self._program = program
        self.obstacle = why_not or obstacle_to_program(program)
        self._request = Request(
            items=items,
            abilities=ABILITIES._replace(calls=call_table_of(program) or CallTable.of(0)),
            tables=HandlerMaps.sizes(),
            shared_tables=frozenset(range(len(program.tables))),
            wants_tid=bool(items & (Item.UID | Item.PROCESS_NAME)),
            vars=program.vars,
            gvars=program.gvars,
            cvars=program.cvars,
            tvars=program.tvars,
        )
        self._eligibility = Eligibility(program)
        self._families: dict[tuple[object, ...], HandlerFamily] = {}
        self._codes: dict[int, list[HandlerCode]] = {}
        """The contents of a program's handlers, by the identity of its encoded form, which its site keeps alive."""

    def pieces(self, number: int, probe: Probepoint, site: CompiledSite | None) -> tuple[Piece, ...] | str:
        """Return the pieces for a probepoint, or the reason why its handler cannot run in the process."""
        if self.obstacle is not None:
            return self.obstacle
        content = None if site is None else self._content(site)[probe.number]
        if (problem := self._eligibility.obstacle_to(probe, content)) is not None:
            return problem
        if site is None:
            return "its file cannot be analysed"
        if (problem := obstacle_to_module(site.resolved.architecture)) is not None:
            return problem
        if number >= PROBES_MAX:
            return "the program has too many probepoints"
        try:
            if probe.at_return:
                return tuple(self._of_return(number, probe, site))
            diverts = self._eligibility.traits(probe, content).diverts
            handler = self._lowered(number, probe, site, _Form(diverts=diverts))
        except NotSupportedError as error:
            return error.message
        instruction, trial = probe.instruction, trial_before(self._program, probe)
        assert not isinstance(trial, str), "the probepoint has an obstacle"
        guard = None
        if (check := probe.definition.access) is not None and (guard := guard_of(check, instruction.raw)) is None:
            return "no single instruction computes the address of its access"
        return (Piece(Order.HANDLER, number, instruction.address, instruction.raw, handler, trial, diverts, guard),)

    def is_ending(self, probe: Probepoint, site: CompiledSite | None) -> bool:
        """Return True if the handler of a probepoint may decide that a hit is the last one."""
        content = None if site is None else self._content(site)[probe.number]
        return self._eligibility.traits(probe, content).is_ending

    def _request_for(self, number: int, probe: Probepoint, site: CompiledSite, form: _Form) -> Request:
        """Return the request to lower a handler for a probepoint."""
        abilities = self._request.abilities
        return replace(
            self._request,
            probe=number,
            link=probe.instruction.address if form.link is None else form.link,
            symbols=dict(site.resolved.symbols),
            passcount=probe.definition.passcount,
            maxhits=probe.definition.maxhits,
            abilities=abilities._replace(overrides_returns=True) if form.diverts else abilities,
            diverts=form.diverts,
            placement=form.placement,
            return_bytes=form.return_bytes,
            entry=form.entry,
        )

    def _of_return(self, number: int, probe: Probepoint, site: CompiledSite) -> list[Piece]:
        entry, found = _kept(self._program, probe.definition), []
        if entry is not None:
            request = self._request_for(number, probe, site, _Form(entry=entry))
            made = entry_program(architecture(_NAME), request, Host).assembled
            keeping, instruction = NumberedCode(made, number), probe.instruction
            found.append(Piece(Order.ENTRY, number, instruction.address, instruction.raw, keeping))
        known: dict[tuple[int, int], NumberedCode] = {}
        for leaving in probe.code.exits.exits:
            if leaving.kind is not ExitKind.RETURN:
                continue
            raw = leaving.raw
            dropped = int.from_bytes(raw[-2:], "little") if raw[-3:-2] == bytes((_RET_NUMBER,)) else 0
            key = dropped, leaving.address if site.resolved.symbols else 0
            if key not in known:
                form = _Form(Placement.RET_SITE, dropped, leaving.address, entry)
                known[key] = self._lowered(number, probe, site, form)
            found.append(Piece(Order.RETURN, number, leaving.address, raw, known[key]))
        return found

    def _lowered(self, number: int, probe: Probepoint, site: CompiledSite, form: _Form) -> NumberedCode:
        """Return the code of a handler; handlers with the same content differ only in data of their probepoints."""
        definition, point = probe.definition, site.point
        shape = (
            self._content(site)[probe.number],
            (point.minor, point.heap, point.exception_mask, point.arguments),
            (form.placement, form.return_bytes, definition.passcount, definition.maxhits, form.diverts),
            id(site.resolved),
        )
        family = self._families.get(shape)
        if family is None:
            family = self._families[shape] = HandlerFamily()

        def compiled(start: int, distance: int) -> Assembled:
            request = self._request_for(number, probe, site, form)
            moved = point._replace(offset=point.offset + distance)
            return self._compiled(site, start, moved, replace(request, link=request.link + distance))

        return family.handler(number, site.resolved.image.handlers[probe.number], compiled)

    def _content(self, site: CompiledSite) -> list[HandlerCode]:
        """Return the content of each handler of a program, in the order of the definitions."""
        image = site.resolved.image
        if id(image) not in self._codes:
            self._codes[id(image)] = handler_codes(image)
        return self._codes[id(image)]

    def _compiled(self, site: CompiledSite, start: int, point: Point, request: Request) -> Assembled:
        handler = site.resolved.image, architecture(_NAME), start, point
        lowered = lower(*handler, request)
        if not _has_records(lowered):  # then the header items are not needed
            lowered = lower(*handler, replace(request, items=Item(0)))
        if lowered.state.size > STATE_MAX:
            raise NotSupportedError("its handler needs too much memory")
        return trimmed(lowered.assembled)  # removes code whose results are unused


class HandlerCode(NamedTuple):
    """
    Content of an encoded handler; handlers with equal contents have the same effect.

    ``relocations`` are the places of addresses of symbols: (offset in the handler, symbol, addend) each. Calls of
    procedures are encoded as distances: so ``start`` is the handler's offset in the program if it has calls, else None.
    """

    data: bytes
    relocations: tuple[tuple[int, str, int], ...]
    start: int | None


def handler_codes(image: CodeImage) -> list[HandlerCode]:
    """Return the contents of all handlers of an encoded program, in the order of their definitions."""
    ends = sorted({*image.handlers, *image.procedures.values(), len(image.data)})
    calls = [offset for offset, each in image.instructions if each.row.operand_kind is OperandKind.PROCEDURE]
    places = [relocation.offset for relocation in image.relocations]
    codes = []
    for start in image.handlers:
        end = ends[bisect_right(ends, start)] if start < ends[-1] else start
        symbols = image.relocations[bisect_left(places, start) : bisect_left(places, end)]
        moved = tuple((each.offset - start, each.symbol, each.addend) for each in symbols)
        has_calls = bisect_left(calls, start) < bisect_left(calls, end)
        codes.append(HandlerCode(image.data[start:end], moved, start if has_calls else None))
    return codes


def _kept(program: Program, definition: ProbeDefinition) -> KeptEntry | None:
    """Return the registers at entry that a handler of a return needs; None if it needs none."""
    registers = entry_registers(program, definition, architecture(_NAME))
    if registers is None:
        return None
    return KeptEntry(tuple((each.name, each.index, each.memory_offset) for each in registers))


def _has_records(lowered: Lowered) -> bool:
    """Return True if a handler may write to a ring."""
    call = Class.JMP | Jump.CALL
    return any(insn.opcode == call and insn.imm == Helper.RINGBUF_OUTPUT for insn in lowered.assembled.code)


class SiteGroup(NamedTuple):
    """
    Pieces of instructions that belong together, by address, each in the order in which they run.

    The highest address is first: a punned jump shares bytes with the following instruction.

    With ``is_bound``, all of the instructions have jumps, or none. Handlers in the tracer cannot read data that
    handlers in the process have kept, and vice versa. So the entry and all returns of a function have jumps, or none of
    them has. If an instruction serves several probepoints, this applies to all of them together.
    """

    sites: dict[int, list[Piece]]
    is_bound: bool


class PlannedSite(NamedTuple):
    """
    Pieces that run at one instruction of a process, in order.

    ``groups`` are as in ``SitePatch``; ``bound`` has the addresses of all instructions of the groups.
    """

    pieces: tuple[Piece, ...]
    groups: tuple[tuple[int, int], ...] = ()
    bound: frozenset[int] = frozenset()

    @property
    def owners(self) -> tuple[tuple[int, int], ...]:
        """The probepoints of the pieces, (program, probepoint) each."""
        return tuple(dict.fromkeys((piece.program, piece.probe) for piece in self.pieces))

    def probes_of(self, program: int) -> list[int]:
        """Return the numbers of the probepoints of one program at this instruction."""
        return [probe for number, probe in self.owners if number == program]


def site_groups(pieces: Iterable[Piece]) -> Iterator[SiteGroup]:
    """Iterate over groups of pieces that belong together, those with the highest addresses first."""
    sites: dict[int, list[Piece]] = {}
    of_probe: dict[int, list[int]] = {}
    binding: set[int] = set()
    for piece in pieces:
        sites.setdefault(piece.address, []).append(piece)
        of_probe.setdefault(piece.probe, []).append(piece.address)
        if piece.order is Order.ENTRY:
            binding.add(piece.probe)
    left = dict.fromkeys(sorted(sites, reverse=True))
    for first in tuple(left):
        if first not in left:
            continue
        waiting, members, is_bound = [first], [], False
        while waiting:
            address = waiting.pop()
            if address not in left:
                continue
            del left[address]
            members.append(address)
            for probe in {piece.probe for piece in sites[address]} & binding:
                is_bound = True
                waiting += of_probe[probe]
        members.sort(reverse=True)
        yield SiteGroup({address: _in_order(sites[address]) for address in members}, is_bound)


def planned_sites(groups: Iterable[SiteGroup], program: int, bias: int) -> dict[int, PlannedSite]:
    """Return the pieces of a program by address in a process, which has mapped the module at the given bias."""
    planned = {}
    for group in groups:
        names = ((program, min(group.sites)),) if group.is_bound else ()
        bound = frozenset(address + bias for address in group.sites) if group.is_bound else frozenset[int]()
        for address, pieces in group.sites.items():
            mine = tuple([piece._replace(program=program) for piece in pieces])
            planned[address + bias] = PlannedSite(mine, names, bound)
    return planned


def joined(sites: Sequence[PlannedSite]) -> PlannedSite:
    """Return the pieces of several programs at one instruction; the programs are in the order of their insertion."""
    pieces = sorted((piece for site in sites for piece in site.pieces), key=lambda piece: piece.order)
    groups = tuple(dict.fromkeys(group for site in sites for group in site.groups))
    return PlannedSite(tuple(pieces), groups, frozenset[int]().union(*(site.bound for site in sites)))


def _in_order(pieces: list[Piece]) -> list[Piece]:
    return sorted(pieces, key=_rank) if len(pieces) > 1 else pieces


def _rank(piece: Piece) -> tuple[int, int]:
    return piece.order, piece.probe


def obstacle_to_all(compiled: ResolvedProgram) -> str | None:
    """Return the reason why all handlers of a program need breakpoints; None if at least one needs none."""
    program, resolved = compiled.program, compiled.resolved
    if resolved is None:
        return "its module is unknown"
    architecture = resolved.architecture
    whole = obstacle_to_program(program) or obstacle_to_module(architecture)
    if whole is not None:
        return whole
    eligibility = Eligibility(program)
    reason = "it has no probepoint"
    for probe in resolved.probepoints:
        found = eligibility.obstacle_to(probe) or _what_is_missing(program, probe.definition, architecture)
        if found is None:
            return None
        reason = found
    return reason


def _what_is_missing(program: Program, definition: ProbeDefinition, architecture: Architecture) -> str | None:
    for instruction in executed_instructions(program, definition):
        operand = instruction.operand
        register = architecture.register(operand) if isinstance(operand, str) else None
        if not is_supported(instruction.row, register, ABILITIES):
            return f"handlers in the process have no '{instruction.row.syntax}'"
    return None
