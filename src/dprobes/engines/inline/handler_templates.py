"""
Machine code of handlers that is assembled once for all places that differ only in numbers.

::

    template of a handler, with a gap for the trial ─┐
    template of a trial, for its kind of access ─────┴─► template of a piece ─► copies: address, site, number of the
                                                                                probepoint, displacements of accesses

A handler that runs at one place only is assembled there (``handler_trampolines``), and so is any code that refers to
its own address in another way.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from dprobes.bpf.bpf_instructions import Alu, Class, Register, X
from dprobes.engines.inline.access_guards import OPENING_SIZE, guard_code
from dprobes.engines.inline.handler_trampolines import NUMBER, SITE, PieceCode, TrialCode, refers_to_itself
from dprobes.engines.inline.handler_trials import Trial
from dprobes.engines.ptrace.site_patches import NativeStop
from dprobes.native.code_template import Varying
from dprobes.native.generated_code import CodeSwitch, Part
from dprobes.native.handler_trampoline import make_trampoline
from dprobes.native.x86.x86_operations import X86Operations

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.bpf.bpf_instructions import Insn
    from dprobes.engines.inline.access_guards import AccessGuard
    from dprobes.engines.inline.handler_pieces import NumberedCode, SiteHandler
    from dprobes.native.code_template import CodeTemplate
    from dprobes.native.generated_code import Surroundings
    from dprobes.native.x86.x86_assembler import X86Assembler

__all__ = ["HandlerAssembler", "MadePiece", "may_vary"]

_GAP = b"\xcc"
"""A byte in the place of a trial; labels before and after the trial differ by it."""
_TEMPLATES_MAX = 8
"""Maximum number of templates of one handler and trial, for numbers with different forms."""
_JUMP_SIZE = 5
_JUMP = b"\xe9"
_NO_TRIAL = Trial(b"")


class MadePiece(NamedTuple):
    """Code of a handler and its trial, up to the displaced instruction, with its stops and switches."""

    code: bytearray
    stops: list[NativeStop]
    switches: list[CodeSwitch]


class _Stop(NamedTuple):
    """Place in a template at which a thread may stop: a mark, by index; the other fields are as in ``NativeStop``."""

    mark: int
    is_trap: bool
    has_frame: bool
    has_flags: bool


class _Switch(NamedTuple):
    """Switch in a template, from the mark with the index ``start`` to that with the index ``end``."""

    start: int
    end: int
    parts: tuple[int, ...]


class _Template(NamedTuple):
    """
    Template of code with its stops and switches.

    That of a handler has the place of its gap, and ``keeps_flags`` as the trial's code depends on it.
    """

    code: CodeTemplate
    stops: tuple[_Stop, ...] = ()
    switches: tuple[_Switch, ...] = ()
    gap: int = 0
    keeps_flags: bool = False

    def copy_at(self, address: int, values: Sequence[int]) -> MadePiece | None:
        """Return the code at an address for the values of the variables; None if another template is needed."""
        code = self.code.copy_at(address, values)
        if code is None:
            return None
        marks, site = self.code.marks, values[SITE]
        stops = [NativeStop(address + marks[mark], site, *how) for mark, *how in self.stops]
        switches = [
            CodeSwitch(
                address + marks[start],
                X86Operations.nothing,
                _JUMP + (marks[end] - marks[start] - _JUMP_SIZE).to_bytes(4, "little", signed=True),
                address + marks[end],
                parts,
            )
            for start, end, parts in self.switches
        ]
        return MadePiece(code, stops, switches)


class _Gap(TrialCode):
    """Trial of a template, whose code is replaced by a gap of fixed bytes into which each copy gets its own trial."""

    def __init__(self, trial: Trial, site: int) -> None:
        super().__init__(trial, site)
        self.place = 0
        self.keeps_flags = False

    def write(self, asm: X86Assembler, *, keeps_flags: bool) -> None:
        """Write the gap in place of the trial's code; record its offset, and whether the frame has all flags."""
        self.place, self.keeps_flags = len(asm), keeps_flags
        asm.raw(_GAP)


class HandlerAssembler:
    """
    Assembler of the code of handlers in one module of a process, by templates where there is one.

    ``around`` are the surroundings of handlers that have none of their own, ``bias`` is the load bias of the module.
    """

    def __init__(self, around: Surroundings, bias: int = 0, *, has_switches: bool) -> None:
        self._own = around
        self._bias = bias
        self._has_switches = has_switches
        self._seen: set[NumberedCode] = set()
        self._handlers: dict[tuple[object, ...], list[_Template]] = {}
        self._pieces: dict[tuple[object, ...], list[_Template]] = {}
        self._trials: dict[tuple[object, ...], list[_Template]] = {}
        self._around: list[Surroundings] = []
        """The surroundings that keys contain by identity."""

    def piece_at(
        self,
        address: int,
        site: int,
        handlers: Sequence[SiteHandler],
        trial: Trial | None,
        rest: Callable[[int], bytes] = lambda _: b"",
    ) -> PieceCode:
        """
        Return the code of the handlers at ``address`` for the instruction at ``site``, with the trial before them.

        ``rest`` returns the code after them for an address. Raise ``OverflowError`` if a routine is too far away.
        """
        if (guard := handlers[0].guard) is not None:
            return self._guarded(guard.placed(self._bias), address, site, handlers[0], trial, rest)
        if len(handlers) == 1:
            made = self.copy_at(address, site, handlers[0], trial)
            if made is not None:
                code, stops, switches = made
                return PieceCode(bytes(code) + rest(address + len(code)), stops, switches)
        asm, before = X86Operations(address), TrialCode(trial, site)
        parts = [
            Part(handler.assembled, self._own if handler.around is None else handler.around) for handler in handlers
        ]
        native = make_trampoline(
            asm, site, parts, lambda asm: asm.raw(rest(asm.here)), before, has_switches=self._has_switches
        )
        return PieceCode(native.code, before.stops, native.switches)

    def _guarded(
        self,
        guard: AccessGuard,
        address: int,
        site: int,
        handler: SiteHandler,
        trial: Trial | None,
        rest: Callable[[int], bytes],
    ) -> PieceCode:
        """Return the code as ``piece_at``, after a guard; the guard has opened the frame for the handler."""
        assert not self._has_switches, "sites with guards are not planned together with those of other programs"
        made = guard_code(guard, address)
        after = b""

        def noted_rest(at: int) -> bytes:
            nonlocal after
            after = rest(at)
            return after

        begin = address + len(made.code)
        piece = self.piece_at(begin - OPENING_SIZE, site, [handler._replace(guard=None)], trial, noted_rest)
        code = bytearray(made.code + piece.code[OPENING_SIZE:])
        struct.pack_into("<i", code, made.jump, len(code) - len(after) - made.jump - 4)
        touch = NativeStop(address + made.touch, site, is_trap=False, has_frame=False, has_flags=False)
        stops = [touch, *(stop for stop in piece.stops if stop.place >= begin)]
        return PieceCode(bytes(code), stops, piece.switches)

    def copy_at(self, address: int, site: int, handler: SiteHandler, trial: Trial | None) -> MadePiece | None:
        """
        Return the copy of a template, without the code after it.

        Return None if there is no template: for the first place of a handler, which may be the only one.
        """
        if handler.code not in self._seen:
            self._seen.add(handler.code)
            return None
        trial = _NO_TRIAL if trial is None else trial
        if trial.ends is not None or (shape := _shape(trial)) is None:
            return None
        around = self._own if handler.around is None else handler.around
        values = (handler.number, site, *[access.displacement for access in trial.accesses])
        known = self._pieces.setdefault((handler.code, id(around), shape), [])
        for template in known:
            if (made := template.copy_at(address, values)) is not None:
                return made
        other = self._piece(address, handler, around, trial, shape, values) if len(known) < _TEMPLATES_MAX else None
        if other is None:
            return None
        known.append(other)
        return other.copy_at(address, values)

    def _piece(
        self,
        address: int,
        handler: SiteHandler,
        around: Surroundings,
        trial: Trial,
        shape: tuple[object, ...],
        values: tuple[int, ...],
    ) -> _Template | None:
        """Return the template of a handler with a trial for these values; None if there is none."""
        known = self._handlers.setdefault((handler.code, id(around), trial.is_executed), [])
        first = next((each for each in known if each.code.has_form(values)), None)
        if first is None:
            first = _handler_template(address, handler, around, trial, values, has_switches=self._has_switches)
            if first is None:
                return None
            known.append(first)
            self._around.append(around)
        trials = self._trials.setdefault((shape, first.keeps_flags), [])
        second = next((each for each in trials if each.code.has_form(values)), None)
        if second is None:
            second = _trial_template(trial, keeps_flags=first.keeps_flags)
            trials.append(second)
        count = len(first.code.marks)
        stops = (*first.stops, *(stop._replace(mark=stop.mark + count) for stop in second.stops))
        return _Template(first.code.with_part(first.gap, len(_GAP), second.code), stops, first.switches)


def _shape(trial: Trial) -> tuple[object, ...] | None:
    """Return the properties on which the code of a trial depends, besides displacements; None for a fixed address."""
    raw = b""
    if trial.is_executed or trial.has_target:
        raw = trial.raw
        if refers_to_itself(raw):
            return None
    accesses = tuple(
        [
            (base, index, scale, segment, size, stores, alignment, touched)
            for base, index, scale, _, segment, size, stores, alignment, touched in trial.accesses
        ]
    )
    return accesses, trial.is_executed, trial.needs_masks, trial.has_target, raw


def _handler_template(
    address: int,
    handler: SiteHandler,
    around: Surroundings,
    trial: Trial,
    values: tuple[int, ...],
    *,
    has_switches: bool,
) -> _Template | None:
    """Return the template of a handler with a gap; None if its numbers cannot be found in the code."""
    number, site = values[NUMBER], values[SITE]
    varying = {index: Varying(NUMBER, growth, number) for index, growth in handler.code.places}
    assembled = handler.assembled
    if not all(may_vary(assembled.code, index) for index in varying):
        return None
    asm, gap = X86Operations(address), _Gap(trial, site)
    parts = [Part(assembled, around, varying)]
    numbered = Varying(SITE, 1, site).with_value(site)
    made = make_trampoline(asm, numbered, parts, lambda _: None, gap, has_switches=has_switches)
    if sum(field.variable == NUMBER for field in asm.fields) != len(varying):
        return None
    marks = [stop.place - address for stop in gap.stops]
    stops = tuple(_stop(stop, mark) for mark, stop in enumerate(gap.stops))
    switches = []
    for switch in made.switches:
        switches.append(_Switch(len(marks), len(marks) + 1, switch.parts))
        marks += switch.address - address, switch.end - address
    return _Template(asm.template(marks), stops, tuple(switches), gap.place, gap.keeps_flags)


def _trial_template(trial: Trial, *, keeps_flags: bool) -> _Template:
    """Return the template of a trial, at address 0."""
    asm, code = X86Operations(0), TrialCode(trial, 0)
    code.write(asm, keeps_flags=keeps_flags)
    stops = tuple(_stop(stop, mark) for mark, stop in enumerate(code.stops))
    return _Template(asm.template([stop.place for stop in code.stops]), stops)


def _stop(stop: NativeStop, mark: int) -> _Stop:
    return _Stop(mark, stop.is_trap, stop.has_frame, stop.has_flags)


_R3, _R10 = Register.R3.value, Register.R10.value
_MOVE, _COPY = Class.ALU64 | Alu.MOV, Class.ALU64 | Alu.MOV | X


def may_vary(code: Sequence[Insn], index: int) -> bool:
    """
    Return True if an immediate is only a number in the machine code.

    Others decide what the code is: the size of an entry in R3, a place in the frame, a helper.
    """
    insn = code[index]
    if not insn.opcode:
        return True  # the second half of a wide load
    if insn.kind == Class.ST:
        return True
    if insn.kind == Class.ALU64 and not insn.has_register:
        is_length = insn.opcode == _MOVE and insn.dst == _R3
        is_place = index > 0 and code[index - 1].opcode == _COPY and code[index - 1].src == _R10
        return not is_length and not is_place
    return False
