"""
Expressions in unwind tables: a stack machine that says where something is, or what it is (DWARF 5, 2.5 and 6.4.2).

Linkers write them for the stubs of the procedure linkage table, C libraries for signal frames. Operations of other
places, such as those with the frame base of a function, raise ValueError.
"""

from __future__ import annotations

import operator
import struct
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dprobes.errors import TargetError
from dprobes.rpn.instruction_set import StackEnd
from dprobes.target.unwind.exception_frames import FrameBytes, FrameImage, RuleKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dprobes.target.unwind.exception_frames import FrameAddress, RegisterRule
    from dprobes.target.unwind.frame_tables import FrameRules

__all__ = ["COLUMNS", "CallStack", "UnwindSpace", "evaluate", "walk"]

_STEPS_MAX = 256
_STACK_MAX = 64

_CONSTANTS = {
    0x08: (1, False), 0x09: (1, True), 0x0A: (2, False), 0x0B: (2, True),
    0x0C: (4, False), 0x0D: (4, True), 0x0E: (8, False), 0x0F: (8, True),
}  # fmt: skip
"""const1u to const8s: size, and whether they have a sign."""

_BINARY: dict[int, Callable[[int, int], int]] = {
    0x1A: operator.and_, 0x1C: operator.sub, 0x1E: operator.mul, 0x21: operator.or_, 0x22: operator.add,
    0x24: operator.lshift, 0x25: operator.rshift, 0x27: operator.xor,
}  # fmt: skip
_COMPARISONS: dict[int, Callable[[int, int], bool]] = {
    0x29: operator.eq, 0x2A: operator.ge, 0x2B: operator.gt, 0x2C: operator.le, 0x2D: operator.lt, 0x2E: operator.ne,
}  # fmt: skip
"""They compare signed numbers."""

_SHIFTS = (0x24, 0x25, 0x26)


def evaluate(expression: bytes, registers: Mapping[int, int], image: FrameImage, initial: int | None = None) -> int:
    """
    Return what an expression leaves on top of its stack, which begins with ``initial``.

    Raise ValueError or IndexError for an expression that cannot be understood, ``TargetError`` for memory that is not
    there.
    """
    machine = _Machine(expression, registers, image)
    if initial is not None:
        machine.stack.append(initial)
    return machine.run()


class _Machine:
    def __init__(self, expression: bytes, registers: Mapping[int, int], image: FrameImage) -> None:
        self._expression = expression
        self._order = "<" if image.byte_order == "little" else ">"
        self._data = FrameBytes(expression, self._order)
        self._registers = registers
        self._image = image
        self._mask = (1 << 8 * image.word_size) - 1
        self.stack: list[int] = []

    def run(self) -> int:
        steps = 0
        while not self._data.is_at_end:
            steps += 1
            if steps > _STEPS_MAX or len(self.stack) > _STACK_MAX:
                raise ValueError("an expression that does not end")
            self._step(self._data.number(1))
        return self.stack[-1]

    def _step(self, operation: int) -> None:
        stack, data = self.stack, self._data
        match operation:
            case _ if 0x30 <= operation < 0x50:  # lit0 to lit31
                stack.append(operation - 0x30)
            case _ if 0x70 <= operation < 0x90:  # breg0 to breg31
                self._push(self._register(operation - 0x70) + data.signed())
            case 0x92:  # bregx
                number = data.unsigned()
                self._push(self._register(number) + data.signed())
            case 0x03:  # addr
                stack.append(data.number(self._image.word_size))
            case _ if operation in _CONSTANTS:
                size, is_signed = _CONSTANTS[operation]
                self._push(data.number(size, is_signed=is_signed))
            case 0x10:  # constu
                self._push(data.unsigned())
            case 0x11:  # consts
                self._push(data.signed())
            case 0x23:  # plus_uconst
                self._push(stack.pop() + data.unsigned())
            case 0x06:  # deref
                stack.append(self._load(stack.pop(), self._image.word_size))
            case 0x94:  # deref_size
                size = data.number(1)
                stack.append(self._load(stack.pop(), size))
            case 0x12:  # dup
                stack.append(stack[-1])
            case 0x13:  # drop
                stack.pop()
            case 0x14:  # over
                stack.append(stack[-2])
            case 0x15:  # pick
                stack.append(stack[-1 - data.number(1)])
            case 0x16:  # swap
                stack[-1], stack[-2] = stack[-2], stack[-1]
            case 0x17:  # rot
                stack[-1], stack[-2], stack[-3] = stack[-2], stack[-3], stack[-1]
            case 0x96:  # nop
                pass
            case _:
                self._calculate_or_jump(operation)

    def _calculate_or_jump(self, operation: int) -> None:
        stack, data = self.stack, self._data
        match operation:
            case 0x19:  # abs
                self._push(abs(self._signed(stack.pop())))
            case 0x1F:  # neg
                self._push(-stack.pop())
            case 0x20:  # not
                self._push(~stack.pop())
            case 0x2F:  # skip
                self._jump(data.number(2, is_signed=True))
            case 0x28:  # bra
                distance = data.number(2, is_signed=True)
                if stack.pop():
                    self._jump(distance)
            case _:
                right, left = stack.pop(), stack.pop()
                self._push(self._binary(operation, left, right))

    def _binary(self, operation: int, left: int, right: int) -> int:
        if operation in _SHIFTS and right >= 8 * self._image.word_size:
            right = 8 * self._image.word_size  # all bits are out, and no number grows without limit
        if operation in _BINARY:
            return _BINARY[operation](left, right)
        if operation in _COMPARISONS:
            return int(_COMPARISONS[operation](self._signed(left), self._signed(right)))
        match operation:
            case 0x26:  # shra
                return self._signed(left) >> right
            case 0x1B if right:  # div, signed, towards zero
                signed, by = self._signed(left), self._signed(right)
                return abs(signed) // abs(by) * (1 if (signed < 0) == (by < 0) else -1)
            case 0x1D if right:  # mod
                return left % right
        raise ValueError(f"operation {operation:#x}")

    def _jump(self, distance: int) -> None:
        place = self._data.position + distance
        if not 0 <= place <= len(self._expression):
            raise ValueError("a jump out of an expression")
        self._data = FrameBytes(self._expression, self._order)
        self._data.skip(place)

    def _push(self, value: int) -> None:
        self.stack.append(value & self._mask)

    def _register(self, number: int) -> int:
        if number not in self._registers:
            raise ValueError(f"register {number} is not known")
        return self._registers[number]

    def _load(self, address: int, size: int) -> int:
        if not 1 <= size <= self._image.word_size:
            raise ValueError(f"{size} bytes of memory")
        return int.from_bytes(self._image.read(address, size), self._image.byte_order)

    def _signed(self, value: int) -> int:
        return value - self._mask - 1 if value >> 8 * self._image.word_size - 1 else value


# The walk up a call stack: from the registers of one frame to those of its caller, as the unwind tables say.
#
# The walk ends where nothing called (a thread's first function), where the tables are missing or cannot be understood,
# where memory cannot be read, or where frames do not come nearer to the bottom of the stack. It never guesses.


class Columns(NamedTuple):
    """
    DWARF's numbers of a processor's registers, by their names, "" for those that are none of the general ones.

    ``pc`` is the column of the return address, or where that is in a register when a function begins, one that no
    table uses. ``bias`` is how far a frame's address is above the stack pointer that its caller had.
    """

    names: tuple[str, ...]
    sp: int
    pc: int
    has_link: bool = False
    """Whether a call leaves the return address in a register."""
    bias: int = 0


def _of_zseries(bias: int) -> Columns:
    return Columns((*(f"gpr{n}" for n in range(16)), *49 * ("",), "pswaddr"), 15, 65, has_link=True, bias=bias)


_POWER = Columns((*(f"r{n}" for n in range(32)), *33 * ("",), "lnk", "ctr", "nip"), 1, 67, has_link=True)

COLUMNS = {
    "x86_64": Columns(
        ("eax", "edx", "ecx", "ebx", "esi", "edi", "ebp", "esp", *(f"r{n}" for n in range(8, 16)), "eip"), 7, 16
    ),
    "i386": Columns(("eax", "ecx", "edx", "ebx", "esp", "ebp", "esi", "edi", "eip"), 4, 8),
    "aarch64": Columns((*(f"x{n}" for n in range(31)), "sp", "pc"), 31, 32, has_link=True),
    "riscv64": Columns((*(f"x{n}" for n in range(32)), *32 * ("",), "pc"), 2, 64, has_link=True),
    "s390": _of_zseries(96),
    "s390x": _of_zseries(160),
    "ppc": _POWER,
    "ppc64": _POWER,
}
"""In the ABI supplements of the processors; the registers have the names of ``arch``."""


class CallStack(NamedTuple):
    """The addresses of a call stack, the innermost first: a place in code, then return addresses."""

    addresses: tuple[int, ...]
    end: StackEnd


class UnwindSpace(FrameImage, Protocol):
    """The memory of a process, with the unwind tables of what it maps."""

    def table_at(self, address: int) -> FrameRules | None:
        """Return the unwind table of the module that an address lies in."""


def walk(space: UnwindSpace, columns: Columns, registers: Mapping[int, int], limit: int) -> CallStack:
    """Return the call stack of a thread with these registers, by DWARF's numbers; of at most ``limit`` frames."""
    current = dict(registers)
    found: list[int] = []
    is_exact = True  # whether the address is that of an instruction to come, and not one behind a call
    while len(found) < limit:
        address = current[columns.pc]
        if not address and found:
            return CallStack(tuple(found), StackEnd.OUTERMOST)
        found.append(address)
        try:
            place = address if is_exact else address - 1
            step = _caller(space, columns, current, place, is_innermost=is_exact)
        except TargetError:
            return CallStack(tuple(found), StackEnd.UNREADABLE)
        except (ValueError, IndexError, struct.error):
            return CallStack(tuple(found), StackEnd.BAD_TABLE)
        if isinstance(step, StackEnd):
            return CallStack(tuple(found), step)
        current, is_exact = step
    return CallStack(tuple(found), StackEnd.LIMIT)


def _caller(
    space: UnwindSpace, columns: Columns, registers: dict[int, int], address: int, *, is_innermost: bool
) -> tuple[dict[int, int], bool] | StackEnd:
    """Return the registers of the caller, and whether it was interrupted rather than made a call."""
    table = space.table_at(address)
    rules = table.rules_at(address) if table is not None else None
    row = rules.row_at(address) if rules is not None else None
    if rules is None or row is None:
        return StackEnd.NO_TABLE
    frame = _frame_address(space, row.frame, registers)
    returns = row.rules.get(rules.common.return_register)
    # A function that calls none leaves the return address in its register, and may have nothing on the stack.
    is_leaf = columns.has_link and is_innermost and (returns is None or returns.kind is RuleKind.SAME)
    if not is_leaf and (returns is None or returns.kind is RuleKind.UNDEFINED):
        return StackEnd.OUTERMOST
    above = dict(registers)
    above[columns.sp] = frame - columns.bias
    if not rules.common.is_signal_frame and above[columns.sp] < registers[columns.sp] + (not is_leaf):
        return StackEnd.NOT_RISING
    for register, rule in row.rules.items():
        value = _value(space, rule, frame, registers, register)
        if value is None:
            above.pop(register, None)
        else:
            above[register] = value
    if columns.pc != rules.common.return_register:
        above[columns.pc] = above[rules.common.return_register]
    return above, rules.common.is_signal_frame


def _frame_address(space: UnwindSpace, frame: FrameAddress, registers: Mapping[int, int]) -> int:
    if frame.register is None:
        return evaluate(frame.expression, registers, space)
    if frame.register not in registers:
        raise ValueError(f"register {frame.register} is not known")
    return (registers[frame.register] + frame.offset) & ((1 << 8 * space.word_size) - 1)


def _value(
    space: UnwindSpace, rule: RegisterRule, frame: int, registers: Mapping[int, int], register: int
) -> int | None:
    """Return the caller's value of a register; None if it is lost."""
    mask = (1 << 8 * space.word_size) - 1
    match rule.kind:
        case RuleKind.AT:
            return _word(space, (frame + rule.number) & mask)
        case RuleKind.OFFSET:
            return (frame + rule.number) & mask
        case RuleKind.REGISTER:
            return registers.get(rule.number)
        case RuleKind.AT_EXPRESSION:
            return _word(space, evaluate(rule.expression, registers, space, frame))
        case RuleKind.EXPRESSION:
            return evaluate(rule.expression, registers, space, frame)
        case RuleKind.SAME:
            return registers.get(register)
        case RuleKind.UNDEFINED:
            return None


def _word(space: UnwindSpace, address: int) -> int:
    return int.from_bytes(space.read(address, space.word_size), space.byte_order)
