"""
What runs at which instruction for a probepoint: eBPF, a piece for each place.

::

    a probepoint before an instruction   its handler there
    a probepoint at a return             its handler at each return instruction, on the state behind that; where it asks
                                         for the entry of the call, also what keeps that where the function begins

A jump that may be a tail call has no piece: the tracer awaits the return of what is called. A function that is left by
such jumps alone has what keeps its entry, if that is asked for.
"""

from __future__ import annotations

import enum
from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.arch import architecture
from dprobes.bpf.asm.isa import Class, Helper, Jump
from dprobes.bpf.calltable import CallTable
from dprobes.bpf.lower import Abilities, LoopForm, Request, lower
from dprobes.bpf.lower.callentries import entry_program
from dprobes.bpf.lower.hosts.host import Host
from dprobes.bpf.lower.request import KeptEntry, Placement
from dprobes.engines.inline.eligibility import (
    Eligibility,
    may_divert,
    obstacle_to_module,
    obstacle_to_program,
    trial_before,
)
from dprobes.engines.inline.handlermaps import STATE_MAX, HandlerMaps
from dprobes.engines.inline.numberedcode import HandlerFamily
from dprobes.engines.inline.sharedstate import PROBES_MAX
from dprobes.errors import NotSupportedError
from dprobes.lazynamedtuple import NamedTuple
from dprobes.native.trim import trimmed
from dprobes.record.layout import Item
from dprobes.rpn.needs import entry_registers
from dprobes.target.code.functionexits import ExitKind

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.bpf.lower.request import Lowered
    from dprobes.engines.inline.trials import Trial
    from dprobes.engines.ptrace.client.answers import CompiledSite
    from dprobes.resolve.probepoints import Probepoint
    from dprobes.rpn.program import ProbeDefinition, Program
    from dprobes.vm import Point

__all__ = ["ABILITIES", "Order", "Piece", "PieceWriter", "call_table_of"]

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
"""What handlers in the process are compiled with."""


class Order(enum.IntEnum):
    """Say in which order pieces of one instruction run: as the tracer does it at a breakpoint."""

    ENTRY = 0
    HANDLER = 1
    RETURN = 2


class Piece(NamedTuple):
    """
    Hold what runs for a probepoint at one instruction, whose link address and bytes these are.

    With a ``trial`` it runs only if that has found that the instruction will complete. It ``diverts`` if it may end so
    that the instruction does not follow. The number of the ``program`` is known once that is inserted.
    """

    order: Order
    probe: int
    address: int
    raw: bytes
    assembled: Assembled
    trial: Trial | None = None
    diverts: bool = False
    program: int = 0


def call_table_of(program: Program) -> CallTable | None:
    """Return the table that a program keeps calls in; None if it asks for no entries."""
    kept = (_kept(program, definition) for definition in program.definitions)
    counts = [len(entry.registers) for entry in kept if entry is not None]
    return CallTable.of(max(counts)) if counts else None


class PieceWriter:
    """
    A writer of pieces for the probepoints of one program; ``items`` are those of its records.

    ``why_not`` is what speaks against all of them.
    """

    def __init__(self, program: Program, items: Item, why_not: str | None = None) -> None:
        self._program = program
        self.obstacle = why_not or obstacle_to_program(program)
        self._request = Request(
            items=items,
            abilities=replace(ABILITIES, calls=call_table_of(program) or CallTable.of(0)),
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

    def pieces(self, number: int, probe: Probepoint, site: CompiledSite | None) -> tuple[Piece, ...] | str:
        """Return the pieces for a probepoint, or why its handler cannot run in the process."""
        if self.obstacle is not None:
            return self.obstacle
        if (problem := self._eligibility.obstacle_to(probe)) is not None:
            return problem
        if site is None:
            return "its file cannot be looked at for that"
        if (problem := obstacle_to_module(site.resolved.architecture)) is not None:
            return problem
        if number >= PROBES_MAX:
            return "the program has too many probepoints"
        request = replace(
            self._request,
            probe=number,
            link=probe.instruction.address,
            symbols=dict(site.resolved.symbols),
            passcount=probe.definition.passcount,
            maxhits=probe.definition.maxhits,
        )
        try:
            if probe.at_return:
                return tuple(self._of_return(number, probe, site, request))
            diverts = may_divert(self._program, probe)
            if diverts:
                abilities = replace(request.abilities, overrides_returns=True)
                request = replace(request, abilities=abilities, diverts=True)
            handler = self._lowered(probe, site, request)
        except NotSupportedError as error:
            return error.message
        instruction, trial = probe.instruction, trial_before(self._program, probe)
        assert not isinstance(trial, str), "the probepoint has an obstacle"
        return (Piece(Order.HANDLER, number, instruction.address, instruction.raw, handler, trial, diverts),)

    def _of_return(self, number: int, probe: Probepoint, site: CompiledSite, request: Request) -> list[Piece]:
        entry, found = _kept(self._program, probe.definition), []
        if entry is not None:
            keeping = entry_program(architecture(_NAME), replace(request, entry=entry), Host).assembled
            instruction = probe.instruction
            found.append(Piece(Order.ENTRY, number, instruction.address, instruction.raw, keeping))
        known: dict[tuple[int, int], Assembled] = {}
        for leaving in probe.code.exits.exits:
            if leaving.kind is not ExitKind.RETURN:
                continue
            raw = leaving.raw
            dropped = int.from_bytes(raw[-2:], "little") if raw[-3:-2] == bytes((_RET_NUMBER,)) else 0
            key = dropped, leaving.address if request.symbols else 0
            if key not in known:
                known[key] = self._lowered(
                    probe,
                    site,
                    replace(
                        request,
                        placement=Placement.RET_SITE,
                        return_bytes=dropped,
                        link=leaving.address,
                        entry=entry,
                    ),
                )
            found.append(Piece(Order.RETURN, number, leaving.address, raw, known[key]))
        return found

    def _lowered(self, probe: Probepoint, site: CompiledSite, request: Request) -> Assembled:
        """Return the code of a handler; those of a definition are the same but for what is said of the probepoint."""
        assert request.probe is not None
        shape = probe.number, replace(site.point, offset=0), request.placement, request.return_bytes, id(site.resolved)
        family = self._families.setdefault(shape, HandlerFamily())

        def compiled(distance: int) -> Assembled:
            point = replace(site.point, offset=site.point.offset + distance)
            return self._compiled(probe, site, point, replace(request, link=request.link + distance))

        return family.handler(request.probe, compiled)

    def _compiled(self, probe: Probepoint, site: CompiledSite, point: Point, request: Request) -> Assembled:
        image = site.resolved.image
        handler = image, architecture(_NAME), image.handlers[probe.number], point
        lowered = lower(*handler, request)
        if not _has_records(lowered):  # so nothing of a header is needed
            lowered = lower(*handler, replace(request, items=Item(0)))
        if lowered.state.size > STATE_MAX:
            raise NotSupportedError("its handler needs too much memory")
        return trimmed(lowered.assembled)  # nobody asks for what it would only do for the record, say


def _kept(program: Program, definition: ProbeDefinition) -> KeptEntry | None:
    """Return what a handler of a return wants to know of the entry."""
    registers = entry_registers(program, definition, architecture(_NAME))
    if registers is None:
        return None
    return KeptEntry(tuple((each.name, each.index, each.memory_offset) for each in registers))


def _has_records(lowered: Lowered) -> bool:
    """Return whether a handler may put something into a ring."""
    call = Class.JMP | Jump.CALL
    return any(insn.opcode == call and insn.imm == Helper.RINGBUF_OUTPUT for insn in lowered.assembled.code)
