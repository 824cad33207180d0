"""
Assembler for eBPF: instructions are methods, jumps go to labels, and maps have names.

::

    asm = Assembler()
    done = asm.label()
    asm.load(R0, R1, 112)                 # ctx->rdi
    asm.jump_if(Jump.JEQ, R0, 0, done)
    asm.load_value(R1, MapName.LOCALS)
    asm.atomic(Atomic.ADD, R1, 0, R0)
    asm.place(done)
    asm.mov(R0, 0)
    asm.exit()
    assembled = asm.assemble()

Unreachable code is omitted, because the verifier rejects it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from dprobes.bpf.bpf_instructions import (
    CALL,
    WIDE_LOAD,
    Alu,
    Atomic,
    CallKind,
    Class,
    Helper,
    Insn,
    Jump,
    LoadImmediate,
    Mode,
    Register,
    Size,
    X,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.bpf.map_layouts import MapName

__all__ = ["Assembled", "Assembler", "Label", "MapReference"]

Label = int


@dataclass(frozen=True, slots=True)
class MapReference:
    """
    A 64-bit load, at ``index``, whose immediate the loader replaces by the file descriptor of a map.

    With ``is_value`` it loads an address in the map's only element, at the offset in its second slot.
    """

    index: int
    map: MapName
    is_value: bool


class Assembled(NamedTuple):
    """
    Assembled code: instruction slots, and the references to maps in them.

    ``origins`` has the value of ``Assembler.origin`` for each slot. ``functions`` has the index of the first slot of
    each function; the main function begins at 0.
    """

    code: tuple[Insn, ...]
    maps: tuple[MapReference, ...]
    origins: tuple[int, ...]
    functions: tuple[int, ...]

    @property
    def end_of_main(self) -> int:
        """The index after the main function."""
        return self.functions[1] if len(self.functions) > 1 else len(self.code)


_R0 = Register.R0
_ALU = {True: Class.ALU64, False: Class.ALU}
_JMP = {True: Class.JMP, False: Class.JMP32}
_ENDS = (Class.JMP | Jump.JA, Class.JMP | Jump.EXIT)


def _refuse(offset: int, immediate: int) -> NoReturn:
    """Raise OverflowError for the offset of an instruction if it is out of range, otherwise for its immediate."""
    field, value, bits = ("immediate", immediate, 32) if -0x8000 <= offset < 0x8000 else ("offset", offset, 16)
    raise OverflowError(f"{field} {value} does not fit into {bits} bits")


class Assembler:
    """
    Sequence of instructions under construction.

    The docstring of a method describes the effect of the instructions that it appends. ``wide`` operations work on 64
    bits. The others work on the low 32 bits, and clear the upper half of their destination. ``origin`` is recorded with
    each following instruction: the offset of the encoded RPN instruction from which it is lowered, or -1.
    """

    def __init__(self) -> None:
        self.origin = -1
        self._code: list[Insn] = []
        self._origins: list[int] = []
        self._targets: dict[int, Label] = {}
        self._maps: dict[int, MapName] = {}
        self._places: list[int | None] = []
        self._functions: list[Label] = []
        self._included: list[range] = []
        self._left_out: set[int] = set()

    def __len__(self) -> int:
        return len(self._code)

    # Labels

    def label(self) -> Label:
        """Return a new label for ``jump`` and ``place``. It has no position yet."""
        self._places.append(None)
        return len(self._places) - 1

    def place(self, label: Label) -> None:
        """Make a label stand for the next instruction that is appended."""
        assert self._places[label] is None, "a label is placed twice"
        self._places[label] = len(self._code)

    def function(self, label: Label) -> None:
        """Make a label stand for the next instruction, where a function that is called or passed to a helper starts."""
        self._functions.append(label)
        self.place(label)

    # Instructions

    def emit(self, opcode: int, dst: Register = _R0, src: Register | int = 0, off: int = 0, imm: int = 0) -> None:
        """
        Append an instruction. ``src`` is a register, or a value of ``LoadImmediate`` or ``CallKind``.

        ``off`` and ``imm`` are signed. Raise OverflowError if one of them is out of range.
        """
        # The code is optimised: a program has hundreds of instructions, and a run may have thousands of programs.
        source = src._value_ if isinstance(src, Register) else src
        if not (-0x8000 <= off < 0x8000 and -0x8000_0000 <= imm < 0x8000_0000):
            _refuse(off, imm)
        self._code.append(Insn(opcode, dst._value_, source, off, imm))
        self._origins.append(self.origin)

    def mov(self, dst: Register, value: Register | int, *, wide: bool = True) -> None:
        """
        Set ``dst`` to a register or to a number of up to 64 bits, signed or unsigned.

        With ``wide`` False, set it to the low 32 bits.
        """
        if isinstance(value, Register):
            self.emit(_ALU[wide] | Alu.MOV | X, dst, value)
        elif -(1 << 31) <= value < 1 << 31 and wide:
            self.emit(Class.ALU64 | Alu.MOV, dst, imm=value)
        elif 0 <= value < 1 << 32 or not wide:
            self.emit(Class.ALU | Alu.MOV, dst, imm=_signed32(value))
        else:
            self._wide_load(dst, LoadImmediate.NUMBER, value, value >> 32)

    def alu(self, operation: Alu, dst: Register, operand: Register | int, *, wide: bool = True) -> None:
        """
        Apply an operation to ``dst`` and ``operand``. A number is sign-extended from 32 bits.

        If ``wide`` is False, operate on the low 32 bits and clear the upper half.
        """
        if isinstance(operand, Register):
            self.emit(_ALU[wide] | operation | X, dst, operand)
        else:
            self.emit(_ALU[wide] | operation, dst, imm=operand)

    def derive(
        self, operation: Alu, dst: Register, src: Register | int, operand: Register | int, *, wide: bool = True
    ) -> None:
        """Set ``dst`` to the result of an operation on ``src`` and ``operand``."""
        self.mov(dst, src, wide=wide)
        self.alu(operation, dst, operand, wide=wide)

    def add(self, dst: Register, src: Register | int, operand: Register | int) -> None:
        """Set ``dst`` to the sum of ``src`` and ``operand``."""
        self.derive(Alu.ADD, dst, src, operand)

    def neg(self, dst: Register, *, wide: bool = True) -> None:
        """Set ``dst`` to its value with the opposite sign."""
        self.emit(_ALU[wide] | Alu.NEG, dst)

    def load(self, dst: Register, base: Register, offset: int, size: Size = Size.DW) -> None:
        """Load a value of ``size`` from memory at ``base + offset`` to ``dst``, zero-extended."""
        self.emit(Class.LDX | Mode.MEM | size, dst, base, offset)

    def store(self, base: Register, offset: int, value: Register | int, size: Size = Size.DW) -> None:
        """Store a register or a number at ``base + offset``. A number is sign-extended from 32 bits."""
        if isinstance(value, Register):
            self.emit(Class.STX | Mode.MEM | size, base, value, offset)
        else:
            self.emit(Class.ST | Mode.MEM | size, base, off=offset, imm=value)

    def copy(self, base: Register, target: int, source: int, by: Register = Register.R1) -> None:
        """Copy the 64-bit word at ``base + source`` to ``base + target``. Clobbers ``by``."""
        self.load(by, base, source)
        self.store(base, target, by)

    def copy_from(
        self,
        source: Register,
        source_offset: int,
        base: Register,
        offset: int,
        by: Register = Register.R1,
        size: Size = Size.DW,
    ) -> None:
        """Copy a value of ``size`` from ``source + source_offset`` to ``base + offset``. Clobbers ``by``."""
        self.load(by, source, source_offset, size)
        self.store(base, offset, by, size)

    def increase(
        self, base: Register, offset: int, amount: Register | int, by: Register = Register.R1, *, wide: bool = True
    ) -> None:
        """
        Add ``amount`` to the 64-bit word at ``base + offset``, not atomically.

        The register ``by`` then has the sum.
        """
        self.load(by, base, offset)
        self.alu(Alu.ADD, by, amount, wide=wide)
        self.store(base, offset, by)

    def take_next(self, dst: Register, base: Register, offset: int, by: Register) -> None:
        """
        Load the 64-bit word at ``base + offset`` to ``dst``, and add 1 to it in memory. Clobbers ``by``.

        This is not atomic.
        """
        self.load(dst, base, offset)
        self.add(by, dst, 1)
        self.store(base, offset, by)

    def atomic(
        self,
        operation: Atomic,
        base: Register,
        offset: int,
        src: Register,
        *,
        size: Size = Size.DW,
        fetch: bool = False,
    ) -> None:
        """
        Apply an atomic operation with ``src`` to the 4 or 8 bytes at ``base + offset``.

        With ``fetch``, the old value goes to ``src``, or to R0 for CMPXCHG.
        """
        imm = operation | (Atomic.FETCH if fetch else 0)
        self.emit(Class.STX | Mode.ATOMIC | size, base, src, offset, imm)

    def count(self, base: Register, offset: int, by: Register = Register.R2) -> None:
        """Add 1 to the 64-bit word at ``base + offset`` atomically. Clobbers ``by``."""
        self.mov(by, 1)
        self.atomic(Atomic.ADD, base, offset, by)

    def jump(self, label: Label) -> None:
        """Jump to a label unconditionally."""
        self._targets[len(self._code)] = label
        self.emit(Class.JMP | Jump.JA)

    def jump_if(
        self, condition: Jump, dst: Register, operand: Register | int, label: Label, *, wide: bool = True
    ) -> None:
        """
        Jump to a label if ``condition`` is true for ``dst`` and ``operand``, a register or a number.

        If ``wide`` is False, compare the low 32 bits.
        """
        self._targets[len(self._code)] = label
        if isinstance(operand, Register):
            self.emit(_JMP[wide] | condition | X, dst, operand)
        else:
            self.emit(_JMP[wide] | condition, dst, imm=operand)

    def jump_if_word(
        self,
        condition: Jump,
        base: Register,
        offset: int,
        operand: Register | int,
        label: Label,
        by: Register = Register.R1,
        size: Size = Size.DW,
    ) -> None:
        """
        Jump to a label if ``condition`` is true for the word at ``base + offset`` and ``operand``.

        The word is loaded to the register ``by``.
        """
        self.load(by, base, offset, size)
        self.jump_if(condition, by, operand, label)

    def may_goto(self, label: Label) -> None:
        """Jump if the hidden counter or time limit of the BPF program is exhausted (``Jump.MAY_GOTO``)."""
        self._targets[len(self._code)] = label
        self.emit(Class.JMP | Jump.MAY_GOTO)

    def call(self, helper: int) -> None:
        """Call a kernel helper: arguments in R1-R5, result in R0. Clobbers R1-R5."""
        self.emit(Class.JMP | Jump.CALL, src=CallKind.HELPER, imm=helper)

    def call_function(self, label: Label) -> None:
        """
        Call the function of this program that starts at a label.

        Arguments, result and clobbered registers are those of ``call``.
        """
        self._targets[len(self._code)] = label
        self.emit(CALL, src=CallKind.LOCAL)

    def call_kfunc(self, btf_id: int) -> None:
        """
        Call a kernel function (kfunc) by its BTF id.

        Arguments, result and clobbered registers are those of ``call``.
        """
        self.emit(Class.JMP | Jump.CALL, src=CallKind.KFUNC, imm=btf_id)

    def look_up(self, name: MapName, key: Register, offset: int, none: Label | None = None) -> None:
        """
        Set R0 to the address of the value for the key at ``key + offset``, 0 if the map lacks the key. Clobbers R1-R5.

        With ``none``, jump to that label if the map lacks the key.
        """
        self.ask_map(Helper.MAP_LOOKUP_ELEM, name, key, offset)
        if none is not None:
            self.jump_if(Jump.JEQ, Register.R0, 0, none)

    def ask_map(self, helper: Helper, name: MapName, key: Register, offset: int) -> None:
        """
        Call a helper with a map in R1 and the address ``key + offset`` of a key in R2; R0 is the result.

        Clobbers R1-R5.
        """
        self.load_map(Register.R1, name)
        self.add(Register.R2, key, offset)
        self.call(helper)

    def exit(self, result: Register | int | None = None) -> None:
        """Return from the function. ``result`` is loaded to R0 first, unless it is None."""
        if result is not None:
            self.mov(Register.R0, result)
        self.emit(Class.JMP | Jump.EXIT)

    def load_map(self, dst: Register, name: MapName) -> None:
        """Load a pointer to a map, as an argument of a helper."""
        self._maps[len(self._code)] = name
        self._wide_load(dst, LoadImmediate.MAP, 0, 0)

    def load_value(self, dst: Register, name: MapName, offset: int = 0) -> None:
        """Load the address of the byte at ``offset`` in the only element of a map."""
        self._maps[len(self._code)] = name
        self._wide_load(dst, LoadImmediate.MAP_VALUE, 0, offset)

    def point_to_element(self, dst: Register, name: MapName, index: Register, count: int, size: int) -> None:
        """
        Load the address of element ``index`` modulo ``count`` of the array in a map's only element. Clobbers ``index``.

        ``count`` and ``size``, the number of elements and their size in bytes, are powers of two.
        """
        self.alu(Alu.AND, index, count - 1)
        self.alu(Alu.LSH, index, size.bit_length() - 1)
        self.load_value(dst, name)
        self.alu(Alu.ADD, dst, index)

    def load_function(self, dst: Register, label: Label) -> None:
        """Load the address of the function at ``label`` to ``dst`` in the form that ``bpf_loop`` takes."""
        self._targets[len(self._code)] = label
        self._wide_load(dst, LoadImmediate.FUNCTION, 0, 0)

    def _wide_load(self, dst: Register, kind: LoadImmediate, low: int, high: int) -> None:
        self.emit(WIDE_LOAD, dst, kind, imm=_signed32(low))
        self.emit(0, imm=_signed32(high))

    def include(self, assembled: Assembled, functions: Sequence[Label] = ()) -> None:
        """
        Append the main function of assembled code.

        ``functions`` are the labels of its other functions, in their order.
        """
        end = assembled.end_of_main
        starts = dict(zip(assembled.functions[1:], functions, strict=True))
        first = len(self._code)
        for index, insn in enumerate(assembled.code[:end]):
            if insn.is_function_reference:
                self._targets[first + index] = starts[index + 1 + insn.imm]
        self._append(assembled, 0, end)

    def include_functions(self, assembled: Assembled, functions: Sequence[Label]) -> None:
        """Append the functions of assembled code without the main one, and place their labels."""
        end, first = assembled.end_of_main, len(self._code)
        for start, label in zip(assembled.functions[1:], functions, strict=True):
            self._places[label] = first + start - end
            self._functions.append(label)
        self._append(assembled, end, len(assembled.code))

    def _append(self, assembled: Assembled, start: int, end: int) -> None:
        first = len(self._code)
        self._code += assembled.code[start:end]
        self._origins += assembled.origins[start:end]
        self._included.append(range(first, len(self._code)))
        for reference in assembled.maps:
            if start <= reference.index < end:
                self._maps[first + reference.index - start] = reference.map

    # Changes of written code

    @property
    def code(self) -> Sequence[Insn]:
        """The code so far. Jumps have no distances yet."""
        return self._code

    def replace(self, index: int, insn: Insn) -> None:
        """Replace the instruction in a slot. Neither the old nor the new one may be a jump or a 64-bit load."""
        self._code[index] = insn

    def leave_out(self, index: int) -> None:
        """Leave out the instruction in slot ``index``, which neither jumps nor loads 64 bits."""
        self._left_out.add(index)

    # The result

    def assemble(self) -> Assembled:
        """Return the code without unreachable instructions; raise OverflowError if a jump is too long."""
        reached = self.reached()
        kept = [index for index in range(len(self._code)) if reached[index] and index not in self._left_out]
        new_index = [0] * (len(self._code) + 1)
        for new, index in enumerate(kept):
            new_index[index] = new
        for index in sorted(self._left_out, reverse=True):
            new_index[index] = new_index[index + 1]  # a jump to it goes to the next instruction
        code = [self._code[index] for index in kept]
        for index, label in self._targets.items():
            if reached[index]:
                at = new_index[index]
                self.origin = self._origins[index]  # for the error message: the origin of the jump that is too long
                code[at] = self._resolved(code[at], new_index[self._place_of(label)] - at - 1)
        maps = tuple(
            MapReference(new_index[index], name, self._code[index].src == LoadImmediate.MAP_VALUE)
            for index, name in self._maps.items()
            if reached[index]
        )
        functions = [new_index[self._place_of(label)] for label in self._functions if reached[self._place_of(label)]]
        return Assembled(tuple(code), maps, tuple(self._origins[index] for index in kept), (0, *functions))

    def _resolved(self, insn: Insn, distance: int) -> Insn:
        if insn.opcode in (WIDE_LOAD, CALL):
            return insn._replace(imm=distance)
        if not -(1 << 15) <= distance < 1 << 15:
            raise OverflowError(f"a jump over {abs(distance)} eBPF instructions is too long: 32767 is the most")
        return insn._replace(off=distance)

    def _place_of(self, label: Label) -> int:
        place = self._places[label]
        assert place is not None, "a label is used that was never placed"
        return place

    def reached(self) -> bytearray:
        """
        Return a byte for each instruction slot: 1 if it is reachable, otherwise 0.

        Both slots of a 64-bit load are marked.
        """
        code, targets = self._code, self._targets
        reached = bytearray(len(code) + 1)
        for included in self._included:
            # All of it is reachable, or it would not be included; its jumps already have their distances.
            reached[included.start : included.stop] = b"\1" * len(included)
        pending = [0]
        while pending:
            index = pending.pop()
            while not reached[index]:
                assert index < len(code), "the code runs off its end"
                reached[index] = 1
                opcode = code[index].opcode
                if index in targets:
                    pending.append(self._place_of(targets[index]))
                if opcode in _ENDS:
                    break
                if opcode == WIDE_LOAD:
                    reached[index + 1] = 1
                    index += 1
                index += 1
        return reached


def _signed32(value: int) -> int:
    value &= 0xFFFF_FFFF
    return value - (1 << 32) if value >> 31 else value
