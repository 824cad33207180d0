"""
Translator of eBPF to machine code, one instruction after the other, as in the kernel's JITs, for any processor.

The code of a handler has neither a prologue nor an epilogue. The caller sets R1, and R10 to the upper end of a frame
that it has allocated. The handler ends with a jump to a label. The translation of a call depends on the values of R1
and R3, if they are constants.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

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
from dprobes.native.generated_code import MapShape, NativeCode
from dprobes.native.handler_analysis import budget_place, check_code, frame_size, trimmed, uses_budget
from dprobes.native.routines.handler_ring import output_code
from dprobes.native.virtual_assembler import CALL_KEPT, VirtualRegister, move

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.bpf.bpf_assembler import Assembled
    from dprobes.bpf.bpf_instructions import Insn
    from dprobes.bpf.map_layouts import MapName
    from dprobes.native.code_template import Varying
    from dprobes.native.generated_code import MapPlace, Surroundings
    from dprobes.native.virtual_assembler import Label, VirtualAssembler

__all__ = ["Translator", "handler_function", "pieces_of", "write_function"]

_V = VirtualRegister
_REGISTERS = tuple(VirtualRegister)

# The sizes of the pieces in which an entry of a ring is copied fastest.
#
# A processor forwards recently stored data if a load reads only bytes of one store. Otherwise the load waits until all
# of the data is in the cache (Intel optimization manual, section 3.6.4, store forwarding).


_FRAME, _SOURCE = Register.R10.value, Register.R2.value
_WORD, _HALF = 8, 4
_STORES = (Class.ST | Mode.MEM | Size.DW, Class.STX | Mode.MEM | Size.DW)


def pieces_of(code: Sequence[Insn], index: int, size: int) -> tuple[int, ...]:
    """
    Return the sizes, 8 or 4 bytes, in which to copy an entry of ``size`` bytes at R2 into a ring.

    ``index`` is that of the call. A piece has 8 bytes if the code stored its word at once, or if R2 is unknown.
    """
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
    """
    Return the offset from R10 to which R2 points before the instruction ``index``.

    None: R2 is not known to be R10 plus a number there.
    """
    for place in range(index - 1, 0, -1):
        insn, before = code[place], code[place - 1]
        if insn.dst != _SOURCE or insn.kind in (Class.ST, Class.STX, Class.JMP, Class.JMP32):
            continue
        copied = (before.opcode, before.dst, before.src) == (Class.ALU64 | Alu.MOV | X, _SOURCE, _FRAME)
        return insn.imm if copied and insn.opcode == Class.ALU64 | Alu.ADD else None
    return None


LOOP_BUDGET = 1 << 23
"""Number of MAY_GOTO instructions that do not jump in one run of a handler (BPF_MAX_LOOPS)."""

_MODE = 0xE0
_JUMPS, _LEAVING = (Class.JMP, Class.JMP32), (Jump.CALL, Jump.EXIT)
_COPIED_MAX = 256
"""Maximum size in bytes of an entry that inline code copies into a ring."""


class Translator:
    """
    Translator of one handler, which ``handler_analysis.check_code`` has accepted.

    The translation jumps to ``out`` where the handler ends.
    """

    def __init__(
        self,
        asm: VirtualAssembler,
        assembled: Assembled,
        surroundings: Surroundings,
        out: Label,
        *,
        is_shared: bool = False,
        varying: Mapping[int, Varying] = MappingProxyType({}),
    ) -> None:
        self._asm = asm
        self._varying = varying
        """Immediates that the assembler is to note, by the indices of instructions."""
        self._around = surroundings
        self._code = assembled.code
        self._out = out
        self._is_shared = is_shared
        """True if threads run the code at the same time, on memory that they share."""
        self._references = {reference.index: reference.map for reference in assembled.maps}
        self._labels: dict[int, Label] = {}
        self._budget = 0
        """Frame offset of the number of iterations that are left; 0 without MAY_GOTO."""
        self._argument: MapName | None = None
        """The map in R1; None if unknown."""
        self._length: int | None = None
        """The constant in R3; None if unknown."""

    def write(self) -> None:
        """Write the whole handler; raise ``NotSupportedError`` for a helper without a routine."""
        code = self._code
        targets = {
            index + 1 + insn.off
            for index, insn in enumerate(code)
            if insn.kind in _JUMPS and insn.operation not in _LEAVING
        }
        self._labels = {index: self._asm.label() for index in sorted(targets)}
        if uses_budget(code):
            self._budget = budget_place(code)
            self._asm.write_number(_V.R10, self._budget, LOOP_BUDGET)
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
        asm, opcode = self._asm, insn.opcode
        dst, src = _REGISTERS[insn.dst], _REGISTERS[insn.src]
        match insn.kind:
            case Class.ALU64 | Class.ALU as kind:
                operand = src if insn.has_register else self._number(index, insn.imm)
                asm.alu(insn.operation, dst, operand, wide=kind == Class.ALU64)
            case Class.LDX if opcode & _MODE == Mode.MEM:
                asm.read(dst, src, insn.off, insn.size, is_shared=self._is_shared and src is not _V.R10)
            case Class.STX if opcode & _MODE == Mode.MEM:
                asm.write(dst, insn.off, src, insn.size, is_shared=self._is_shared and dst is not _V.R10)
            case Class.ST:
                is_shared = self._is_shared and dst is not _V.R10
                asm.write_number(dst, insn.off, self._number(index, insn.imm), insn.size, is_shared=is_shared)
            case Class.STX if opcode & _MODE == Mode.ATOMIC:
                asm.atomic(insn.imm, dst, insn.off, src, insn.size)
                if insn.imm & Atomic.FETCH and src is _V.R1:
                    self._argument = None
                elif insn.imm & Atomic.FETCH and src is _V.R3:
                    self._length = None
                return
            case Class.JMP | Class.JMP32:
                self._jump(index, insn)
                return
            case _:
                raise AssertionError(f"the code is not well formed: opcode {opcode:#04x}")
        if insn.kind in (Class.ALU64, Class.ALU, Class.LDX):
            if dst is _V.R1:
                self._argument = None
            elif dst is _V.R3:
                self._length = insn.imm if opcode == Class.ALU64 | Alu.MOV else None

    def _number(self, index: int, number: int) -> int:
        """Return a number of the instruction at ``index``, as one that the assembler notes if it varies."""
        varying = self._varying.get(index)
        return number if varying is None else varying.with_value(number)

    def _wide_load(self, index: int, low: Insn, high: Insn) -> None:
        name, dst = self._references.get(index), _REGISTERS[low.dst]
        if name is None:
            move(self._asm, dst, low.imm & 0xFFFF_FFFF | high.imm << 32)
        else:
            offset = high.imm if low.src == LoadImmediate.MAP_VALUE else 0
            move(self._asm, dst, self._number(index + 1, self._place(name).address + offset))
        if dst is _V.R3:
            self._length = None
        if dst is _V.R1:
            self._argument = name if low.src == LoadImmediate.MAP else None

    def _place(self, name: MapName) -> MapPlace:
        place = self._around.maps.get(name)
        if place is None:
            raise NotSupportedError(f"the memory that handlers share with the tool has no map '{name.value}'")
        return place

    def _jump(self, index: int, insn: Insn) -> None:
        operation = insn.operation
        if operation == Jump.CALL:
            self._call(index, insn)
            return
        if operation == Jump.EXIT:
            if index + 1 < len(self._code):
                self._asm.jump(self._out)
            return
        target = self._labels[index + 1 + insn.off]
        if operation == Jump.JA:
            if insn.off:
                self._asm.jump(target)
        elif operation == Jump.MAY_GOTO:
            self._asm.count_pass(self._budget, target)
        else:
            operand = _REGISTERS[insn.src] if insn.has_register else self._number(index, insn.imm)
            is_wide = insn.kind == Class.JMP
            self._asm.branch(operation, _REGISTERS[insn.dst], operand, target, wide=is_wide)

    def _call(self, index: int, insn: Insn) -> None:
        helper, around = Helper(insn.imm), self._around
        if helper is Helper.GET_SMP_PROCESSOR_ID:
            self._asm.read_cpu(around)
            return
        argument, self._argument = self._argument, None
        length, self._length = self._length or 0, None
        if helper is Helper.RINGBUF_OUTPUT and around.rings is not None and 0 < length <= _COPIED_MAX:
            done = self._asm.label()
            piece = output_code(around.rings, length, pieces_of(self._code, index, length))
            Translator(self._asm, piece, around, done, is_shared=True).write()
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
        self._asm.call_at(routine)

    def _write_value_address(self, place: MapPlace) -> None:
        """Write code that sets R0 to the address of an array's value; R2 points to its index, a u32 within bounds."""
        self._asm.read(_V.R0, _V.R2, 0, 4)
        self._asm.alu(Alu.MUL, _V.R0, place.stride)
        move(self._asm, _V.S1, place.address)
        self._asm.alu(Alu.ADD, _V.R0, _V.S1)


def write_function(asm: VirtualAssembler, assembled: Assembled, around: Surroundings, *, is_shared: bool = True) -> int:
    """
    Write eBPF as a function that preserves R6 to R9 and the caller's frame, and return its address.

    With ``is_shared``, as for routines, several threads execute the function at the same time on shared memory.
    """
    check_code(assembled)
    start, out = asm.here, asm.label()
    used = {insn.dst for insn in assembled.code} | {insn.src for insn in assembled.code}
    kept, frame = [register for register in CALL_KEPT if register in used], frame_size(assembled)
    asm.open_function(kept, frame)
    Translator(asm, assembled, around, out, is_shared=is_shared).write()
    asm.place(out)
    asm.close_function(kept, frame)
    return start


def handler_function(asm: VirtualAssembler, assembled: Assembled, around: Surroundings) -> NativeCode:
    """
    Return a handler as a function; its argument is the address of the hit's registers (struct pt_regs).

    Raise ``NotSupportedError`` for code that cannot be translated.
    """
    check_code(assembled)
    write_function(asm, trimmed(assembled), around, is_shared=False)
    return NativeCode(asm.address, asm.assemble())
