"""
Handlers with a small state on the BPF stack. A hit claims no element of SCRATCH.

::

    R10 - 512 ..             the state: the fields that are read, and the record with its header and log
              .. R10         what the code has on the stack anyway

A handler is written like any other, but without the claim. Then each access to the state is redirected to the stack,
and stores to fields that nothing reads are omitted. This fails if the code calculates with an address in the state, or
if the state does not fit. The handler is then written again. The kernel's verifier tracks each value on the stack, so a
handler that is verified must be short, without loops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dprobes.bpf.bpf_instructions import Alu, Class, Mode, Register, X
from dprobes.bpf.lower.lowering_request import LoopForm
from dprobes.bpf.lower.state.handler_state import LOG, RECORD_SPACE, SCRATCH, Field
from dprobes.bpf.lower.templates.table_templates import retries
from dprobes.bpf.lower.templates.variable_templates import uses_variables
from dprobes.bpf.map_layouts import power_of_two
from dprobes.rpn.instruction_set import Flow, Group
from dprobes.rpn.keyed_tables import KeyKind, table_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.bpf.bpf_assembler import Assembler
    from dprobes.bpf.bpf_instructions import Insn
    from dprobes.bpf.lower.handler_flow import HandlerFlow
    from dprobes.bpf.lower.lowering_request import Request
    from dprobes.bpf.lower.template_writer import Writer
    from dprobes.rpn.instruction_encoding import EncodedInstruction
    from dprobes.rpn.keyed_tables import Table

__all__ = ["begin_small", "may_be_small", "move_to_stack"]

_STACK_MAX = 512
_CALLED = 64
"""Bytes of the stack that the frames of called functions take (``PagingQuestion``)."""
_VERIFIED_INSTRUCTIONS_MAX = 64
_VERIFIED_JUMPS_MAX = 6
"""Maximum number of jumps. The verifier tracks values on the stack, and follows each branch for each of them."""

_MODE = 0xE0
_STATE, _FRAME = SCRATCH.value, Register.R10.value
_MOVE, _ADD = Class.ALU64 | Alu.MOV | X, Class.ALU64 | Alu.ADD
_SET = Class.ALU64 | Alu.MOV
_WORD = 8

_KEYS = (KeyKind.WORD, KeyKind.SIGNED, KeyKind.ADDRESS, KeyKind.COMM)
"""The kinds of key that are built without a loop, and without the help of the reader."""


def may_be_small(flow: HandlerFlow, request: Request, word_size: int) -> bool:
    """Return whether the handler's state may fit on the stack, so that ``move_to_stack`` is worth trying."""
    if not request.abilities.small_states or request.keeps_stack or request.shared or request.maxhits:
        return False
    if request.abilities.loops is LoopForm.CALLBACK:
        return False  # the handler is a separate function, whose frame is not that of the program
    if request.module is not None or request.watched is not None or request.note is not None:
        return False
    if request.abilities.verified and (
        flow.has_cycle
        or len(flow.instructions) > _VERIFIED_INSTRUCTIONS_MAX
        or uses_variables(flow)
        or flow.jumps > _VERIFIED_JUMPS_MAX
    ):
        return False
    if any(None in known for known in flow.known.values()):
        return False
    if not all(_fits(instruction, flow) for instruction in flow.instructions.values()):
        return False
    bound = flow.log_bound(word_size)
    return bound is not None and bound + RECORD_SPACE < _STACK_MAX


def _fits(instruction: EncodedInstruction, flow: HandlerFlow) -> bool:
    """Return whether an instruction uses only those parts of the state for which the BPF stack has room."""
    row = instruction.row
    if row is None or row.group is Group.HEAP or row.operator in ("callk", "trace", "vfyrw"):
        return False
    if row.group is Group.TABLE and not _is_plain(table_of(instruction.operand, flow.tables)):
        return False
    return row.flow is not Flow.END or row.syntax in ("exit", "abort")


def _is_plain(table: Table | None) -> bool:
    """Return whether instructions on a table need no loop, and no part of the state but the key."""
    return table is not None and not retries(table) and all(key.kind in _KEYS for key in table.keys)


class _Span(NamedTuple):
    """A range of bytes of the state, from ``start`` to ``end`` (excluded)."""

    start: int
    end: int

    def meets(self, other: _Span) -> bool:
        return self.start < other.end and other.start < self.end


def begin_small(w: Writer) -> None:
    """Mark the writer's handler as one with a small state, before code is written: its log is as small as possible."""
    bound = w.flow.log_bound(w.word_size)
    assert bound is not None
    w.is_small, w.log_mask = True, power_of_two(bound + 1) - 1


def move_to_stack(w: Writer) -> bool:
    """Move the state of a written handler to the stack; return False if that is not possible."""
    asm, logged, state = w.asm, w.logged, w.state
    if logged is not None:
        for index in w.cleared:
            asm.leave_out(index)  # the handler writes the whole record
    key = _Span(state.key, state.key + state.keys)
    room = _STACK_MAX - _CALLED if w.host.sleeps else _STACK_MAX
    try:
        uses = _StateUses(asm, w.log_mask if logged is None else logged, key)
        uses.move(room, aligned=w.request.abilities.verified)
    except _UnmovableError:
        return False
    return True


class _UnmovableError(Exception):
    """Raised for a handler whose state cannot be on the BPF stack."""


class _StateUses:
    """
    Accesses of code to its state.

    ``log_size`` bytes of the log may be accessed. ``key`` is the range of a key.
    """

    def __init__(self, asm: Assembler, log_size: int, key: _Span) -> None:
        self._asm = asm
        self._code = asm.code
        self._log_size = log_size
        self._key = key
        self._accesses: dict[int, _Span] = {}
        self._addresses: dict[int, _Span] = {}
        self._read: list[_Span] = []
        self._lowest = 0
        """The lowest stack offset that the code uses itself, relative to R10."""
        reached = asm.reached()
        for index, insn in enumerate(self._code):
            if reached[index]:
                self._look_at(index, insn)

    def _look_at(self, index: int, insn: Insn) -> None:
        kind = insn.kind
        if kind in (Class.LD, Class.LDX) and insn.dst == _STATE:
            raise _UnmovableError  # from here on the register no longer points to the state
        if kind in (Class.LDX, Class.ST, Class.STX):
            self._look_at_access(index, insn)
        elif insn.opcode == _MOVE and insn.src == _FRAME:
            lowest = self._code[index + 1].imm if _is_added(self._code, index) else -_STACK_MAX
            self._lowest = min(self._lowest, lowest)
        elif insn.opcode == _MOVE and insn.src == _STATE:
            found = _addressed(self._code, index, self._log_size, self._key)
            if found is None:
                raise _UnmovableError
            self._addresses[index] = found
            self._read.append(found)
        elif kind != Class.LD and (insn.dst == _STATE or (insn.has_register and insn.src == _STATE)):
            raise _UnmovableError

    def _look_at_access(self, index: int, insn: Insn) -> None:
        loads = insn.kind == Class.LDX
        if insn.kind == Class.STX and insn.src == _STATE:
            raise _UnmovableError
        span = _Span(insn.off, insn.off + insn.size)
        base = insn.src if loads else insn.dst
        if base == _FRAME:
            self._lowest = min(self._lowest, span.start)
        elif base == _STATE:
            if insn.opcode & _MODE != Mode.MEM:
                raise _UnmovableError
            self._accesses[index] = span
            if loads:
                self._read.append(span)

    def move(self, room: int, *, aligned: bool) -> None:
        """Move the state to ``room`` bytes of the stack. With ``aligned``, every access must be aligned."""
        asm, code = self._asm, self._code
        starts = [code[index + 1].imm for index in self._addresses]
        first = min((start for start in starts if start > LOG - RECORD_SPACE), default=0)
        places = _places(self._read, self._lowest, room)
        for index, span in self._accesses.items():
            place = next((place for live, place in places if live.meets(span)), None)
            if place is None:
                asm.leave_out(index)
                continue
            insn = code[index]
            if aligned and (insn.off + place) % insn.size:
                raise _UnmovableError
            base = {"src" if insn.kind == Class.LDX else "dst": _FRAME}
            asm.replace(index, insn._replace(off=insn.off + place, **base))
        for index, span in self._addresses.items():
            place = next(place for live, place in places if live.meets(span))
            start = code[index + 1].imm
            if aligned and start != first and (start + place) % _WORD:
                raise _UnmovableError  # words are written to it; the first address is that of the record
            asm.replace(index, code[index]._replace(src=_FRAME))
            asm.replace(index + 1, code[index + 1]._replace(imm=start + place))


def _is_added(code: Sequence[Insn], index: int) -> bool:
    following = code[index + 1]
    return following.opcode == _ADD and following.dst == code[index].dst


def _addressed(code: Sequence[Insn], index: int, log_size: int, key: _Span) -> _Span | None:
    """
    Return the range of the state at the address calculated at ``index``: record, key, or a word to read to.

    Return None for any other address.
    """
    if not _is_added(code, index):
        return None
    start, size = code[index + 1].imm, code[index + 2]
    if LOG - RECORD_SPACE <= start <= LOG:
        return _Span(start, LOG + log_size)
    if key.start <= start < key.end:
        return key
    is_word = size.opcode == _SET and size.dst == Register.R2.value and 0 < size.imm <= _WORD
    if Field.WORK <= start < Field.LOGGED and not start % _WORD and is_word:
        return _Span(start, start + _WORD)
    return None


def _places(read: list[_Span], lowest: int, room: int) -> list[tuple[_Span, int]]:
    """Return the ranges of the state that are read, each with the number to add to its offsets."""
    merged: list[_Span] = []
    for start, end in sorted(_Span(span.start // _WORD * _WORD, -(-span.end // _WORD) * _WORD) for span in read):
        if merged and start < merged[-1].end:
            merged[-1] = _Span(merged[-1].start, max(end, merged[-1].end))
        else:
            merged.append(_Span(start, end))
    top = lowest // _WORD * _WORD
    places = []
    for span in reversed(merged):
        assert span.start >= 0
        top -= span.end - span.start
        places.append((span, top - span.start))
    if top < -room:
        raise _UnmovableError
    return places
