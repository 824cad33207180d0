"""
eBPF to machine code, one instruction after the other, as the kernel's JITs do it: what all processors have in common.

The code of a handler has neither a prologue nor an epilogue: it begins with R1 set and R10 at the end of a frame that
whoever calls has made, and goes to a label at its end. What is known of R1 and R3 at a call decides what that becomes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from dprobes.bpf.bpf_instructions import (
    WIDE_LOAD,
    Alu,
    Atomic,
    Class,
    Helper,
    Jump,
    LoadImmediate,
    Mode,
    Register,
    Size,
    X,
)
from dprobes.errors import NotSupportedError
from dprobes.native.generated_code import MapShape
from dprobes.native.handler_analysis import budget_place, uses_budget
from dprobes.native.routines.handler_ring import output_code

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.bpf.bpf_assembler import Assembled
    from dprobes.bpf.bpf_instructions import Insn
    from dprobes.bpf.map_layouts import MapName
    from dprobes.native.generated_code import MapPlace, Surroundings

__all__ = ["Translator", "pieces_of"]

# In which pieces an entry of a ring is best copied.
#
# A processor hands on what was stored a moment ago if a load wants a part of what one store has written; else it waits
# until all of it is in the cache (Intel optimization manual, section 3.6.4, store forwarding).


_FRAME, _SOURCE = Register.R10.value, Register.R2.value
_WORD, _HALF = 8, 4
_STORES = (Class.ST | Mode.MEM | Size.DW, Class.STX | Mode.MEM | Size.DW)


def pieces_of(code: Sequence[Insn], index: int, size: int) -> tuple[int, ...]:
    """Return the sizes of pieces for a call at ``index`` that puts ``size`` bytes at R2 into a ring."""
    start = _start(code, index)
    stored = {insn.off for insn in code if insn.opcode in _STORES and insn.dst == _FRAME}
    pieces: list[int] = []
    at = 0
    while at < size:
        is_word = start is None or start + at in stored
        pieces.append(_WORD if is_word else _HALF)
        at += pieces[-1]
    return tuple(pieces)


def _start(code: Sequence[Insn], index: int) -> int | None:
    """Return where in the frame R2 points to before ``index``, if it does."""
    for place in range(index - 1, 0, -1):
        insn, before = code[place], code[place - 1]
        if insn.dst != _SOURCE or insn.opcode & 0x07 in (Class.ST, Class.STX, Class.JMP, Class.JMP32):
            continue
        copied = (before.opcode, before.dst, before.src) == (Class.ALU64 | Alu.MOV | X, _SOURCE, _FRAME)
        return insn.imm if copied and insn.opcode == Class.ALU64 | Alu.ADD else None
    return None


LOOP_BUDGET = 1 << 23
"""How often MAY_GOTO goes on (BPF_MAX_LOOPS)."""

_SIZES = {size << 0: size.bytes for size in Size}
_CLASS, _OPERATION, _MODE, _SIZE = 0x07, 0xF0, 0xE0, 0x18
_JUMPS, _LEAVING = (Class.JMP, Class.JMP32), (Jump.CALL, Jump.EXIT)
_FIRST_ARGUMENT, _LENGTH = Register.R1.value, Register.R3.value
_COPIED_MAX = 256
"""The size of an entry up to which it is copied where it is written, word by word."""


class LabelSpace(Protocol):
    """Where labels are made and placed: an assembler."""

    def label(self) -> int:
        """Return a new label."""
        ...

    def place(self, label: int) -> None:
        """Let a label stand for the next instruction."""
        ...


_Asm = TypeVar("_Asm", bound=LabelSpace)


class Translator(ABC, Generic[_Asm]):
    """Write the code of one handler, which is well formed (``handler_analysis``); it goes to ``out`` at its end."""

    def __init__(self, asm: _Asm, assembled: Assembled, surroundings: Surroundings, out: int) -> None:
        self._asm = asm
        self._around = surroundings
        self._code = assembled.code
        self._out = out
        self._references = {reference.index: reference.map for reference in assembled.maps}
        self._labels: dict[int, int] = {}
        self._budget = 0
        """Where the frame has the number of passes that are left, if MAY_GOTO is used."""
        self._argument: MapName | None = None
        """The map that R1 is known to be."""
        self._length: int | None = None
        """The number that R3 is known to be."""

    # What a processor has for it

    @abstractmethod
    def _write_arithmetic(self, insn: Insn) -> None:
        """Write an instruction of the classes ALU and ALU64."""

    @abstractmethod
    def _write_load(self, insn: Insn, size: int) -> None:
        """Write a load of so many bytes, which clears the rest of the register."""

    @abstractmethod
    def _write_store(self, insn: Insn, size: int) -> None:
        """Write a store of a register."""

    @abstractmethod
    def _write_store_of_number(self, insn: Insn, size: int) -> None:
        """Write a store of the immediate, which is sign-extended."""

    @abstractmethod
    def _write_atomic(self, insn: Insn, size: int) -> None:
        """Write an atomic operation."""

    @abstractmethod
    def _write_number(self, register: int, number: int) -> None:
        """Set an eBPF register to a number of 64 bits."""

    @abstractmethod
    def _write_jump(self, target: int) -> None:
        """Jump to a label."""

    @abstractmethod
    def _write_branch(self, insn: Insn, target: int) -> None:
        """Jump to a label under the condition of an instruction."""

    @abstractmethod
    def _write_budget(self, place: int, passes: int) -> None:
        """Store a number of passes in the frame, ``place`` bytes from R10."""

    @abstractmethod
    def _write_pass(self, place: int, target: int) -> None:
        """Take one pass from that number; jump if none was left."""

    @abstractmethod
    def _write_call(self, routine: int) -> None:
        """Call the routine at an address."""

    @abstractmethod
    def _write_cpu(self) -> None:
        """Let R0 be the number of the CPU; other registers are kept."""

    @abstractmethod
    def _write_value_address(self, place: MapPlace) -> None:
        """Let R0 be the address of the value whose index, a u32 that is in bounds, is at R2."""

    @abstractmethod
    def _nested(self, assembled: Assembled, out: int) -> Translator[_Asm]:
        """Return what writes a piece of a routine in the place of a call."""

    # The translation

    def write(self) -> None:
        """Write all of it."""
        code = self._code
        targets = {
            index + 1 + insn.off
            for index, insn in enumerate(code)
            if insn.opcode & _CLASS in _JUMPS and insn.opcode & _OPERATION not in _LEAVING
        }
        self._labels = {index: self._asm.label() for index in sorted(targets)}
        if uses_budget(code):
            self._budget = budget_place(code)
            self._write_budget(self._budget, LOOP_BUDGET)
        index = 0
        while index < len(code):
            if index in self._labels:
                self._asm.place(self._labels[index])
                self._argument = self._length = None
            insn = code[index]
            if insn.opcode == WIDE_LOAD:
                self._wide_load(index, insn, code[index + 1])
                index += 2
                continue
            self._write(index, insn)
            index += 1

    def _write(self, index: int, insn: Insn) -> None:
        opcode = insn.opcode
        match opcode & _CLASS:
            case Class.ALU64 | Class.ALU:
                self._write_arithmetic(insn)
            case Class.LDX if opcode & _MODE == Mode.MEM:
                self._write_load(insn, _SIZES[opcode & _SIZE])
            case Class.STX if opcode & _MODE == Mode.MEM:
                self._write_store(insn, _SIZES[opcode & _SIZE])
            case Class.ST:
                self._write_store_of_number(insn, _SIZES[opcode & _SIZE])
            case Class.STX if opcode & _MODE == Mode.ATOMIC:
                self._write_atomic(insn, _SIZES[opcode & _SIZE])
                if insn.imm & Atomic.FETCH and insn.src == _FIRST_ARGUMENT:
                    self._argument = None
                elif insn.imm & Atomic.FETCH and insn.src == _LENGTH:
                    self._length = None
                return
            case Class.JMP | Class.JMP32:
                self._jump(index, insn)
                return
            case _:
                raise AssertionError(f"the code is not well formed: opcode {opcode:#04x}")
        if opcode & _CLASS in (Class.ALU64, Class.ALU, Class.LDX):
            if insn.dst == _FIRST_ARGUMENT:
                self._argument = None
            elif insn.dst == _LENGTH:
                self._length = insn.imm if opcode == Class.ALU64 | Alu.MOV else None

    def _wide_load(self, index: int, low: Insn, high: Insn) -> None:
        name = self._references.get(index)
        if name is None:
            self._write_number(low.dst, low.imm & 0xFFFF_FFFF | high.imm << 32)
        else:
            offset = high.imm if low.src == LoadImmediate.MAP_VALUE else 0
            self._write_number(low.dst, self._place(name).address + offset)
        if low.dst == _LENGTH:
            self._length = None
        if low.dst == _FIRST_ARGUMENT:
            self._argument = name if low.src == LoadImmediate.MAP else None

    def _place(self, name: MapName) -> MapPlace:
        place = self._around.maps.get(name)
        if place is None:
            raise NotSupportedError(f"the memory that handlers share with the tool has no map '{name.value}'")
        return place

    def _jump(self, index: int, insn: Insn) -> None:
        operation = insn.opcode & _OPERATION
        if operation == Jump.CALL:
            self._call(index, insn)
            return
        if operation == Jump.EXIT:
            if index + 1 < len(self._code):
                self._write_jump(self._out)
            return
        target = self._labels[index + 1 + insn.off]
        if operation == Jump.JA:
            if insn.off:
                self._write_jump(target)
        elif operation == Jump.MAY_GOTO:
            self._write_pass(self._budget, target)
        else:
            self._write_branch(insn, target)

    def _call(self, index: int, insn: Insn) -> None:
        helper, around = Helper(insn.imm), self._around
        if helper is Helper.GET_SMP_PROCESSOR_ID:
            self._write_cpu()
            return
        argument, self._argument = self._argument, None
        length, self._length = self._length or 0, None
        if helper is Helper.RINGBUF_OUTPUT and around.rings is not None and 0 < length <= _COPIED_MAX:
            done = self._asm.label()
            self._nested(output_code(around.rings, length, pieces_of(self._code, index, length)), done).write()
            self._asm.place(done)
            return
        if argument is not None and helper is Helper.MAP_LOOKUP_ELEM:
            place = self._place(argument)
            if place.shape is MapShape.VALUES:
                self._write_value_address(place)
                return
        routine = None if argument is None else around.map_routines.get((argument, helper))
        routine = around.routines.get(helper) if routine is None else routine
        if routine is None:
            raise NotSupportedError(f"there is no routine for what the kernel has as bpf_{helper.name.lower()}")
        self._write_call(routine)
