"""
Walk up a call stack: from the registers of a frame to those of its caller, by the unwind tables.

The walk ends at a frame without a caller (a thread's first function), and where tables are missing or malformed. It
also ends where memory cannot be read, or a frame is not nearer to the bottom of the stack than the one before. The walk
never guesses.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dprobes.errors import TargetError
from dprobes.rpn.instruction_set import StackEnd
from dprobes.target.unwind.dwarf_expressions import Expressible, InMemory, Number, executed
from dprobes.target.unwind.exception_frames import FrameImage, RuleKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.target.unwind.dwarf_expressions import Node
    from dprobes.target.unwind.exception_frames import FrameAddress, RegisterRule
    from dprobes.target.unwind.frame_tables import FrameRules

__all__ = ["COLUMNS", "CallStack", "UnwindSpace", "evaluate", "walk"]


def evaluate(expression: bytes, registers: Mapping[int, int], image: FrameImage, initial: int | None = None) -> int:
    """
    Return the address that a DWARF expression computes. ``initial`` is on its stack first, unless it is None.

    Raise ValueError or IndexError for a malformed expression or an unknown register, and ``TargetError`` for unmapped
    memory.
    """

    def register(number: int) -> Node:
        if number not in registers:
            raise ValueError(f"register {number} is not known")
        return Number(registers[number])

    def memory(address: Node, size: int) -> Node:
        match address:
            case Number(value):
                return Number(int.from_bytes(image.read(value, size), image.byte_order))
        raise ValueError("an address that cannot be computed")

    about = Expressible(image.word_size, image.byte_order, register, memory, Number, {})
    match executed(expression, about, initial):
        case InMemory(Number(value)):
            return value
    raise ValueError("an expression that is not an address")


class Columns(NamedTuple):
    """
    The names of a processor's registers by their DWARF numbers, "" for those that are not general ones.

    ``pc`` is the column of the return address. On processors that pass the return address in a register, it is a column
    that no table uses. ``bias`` is the distance in bytes of a frame's address above its caller's stack pointer.
    """

    names: tuple[str, ...]
    sp: int
    pc: int
    has_link: bool = False
    """True if a call leaves the return address in a register."""
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
"""The registers of each processor, by its ABI supplement, with the names of ``arch``."""


class CallStack(NamedTuple):
    """The addresses of a call stack, the innermost first: a place in code, then return addresses."""

    addresses: tuple[int, ...]
    end: StackEnd


class UnwindSpace(FrameImage, Protocol):
    """The memory of a process, with the unwind tables of its mapped modules."""

    def table_at(self, address: int) -> FrameRules | None:
        """Return the unwind table of the module that contains an address, or None if there is none."""


def walk(space: UnwindSpace, columns: Columns, registers: Mapping[int, int], limit: int) -> CallStack:
    """
    Return the call stack of a thread, at most ``limit`` frames.

    ``registers`` has values by DWARF register number.
    """
    current = dict(registers)
    found: list[int] = []
    is_exact = True  # False for a return address, which is that of the instruction after a call
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
    """
    Return the registers of the caller, or the reason why the walk ends.

    The second item is True if the caller was interrupted, and made no call.
    """
    table = space.table_at(address)
    rules = table.rules_at(address) if table is not None else None
    row = rules.row_at(address) if rules is not None else None
    if rules is None or row is None:
        return StackEnd.NO_TABLE
    frame = _frame_address(space, row.frame, registers)
    returns = row.rules.get(rules.common.return_register)
    # A leaf function leaves the return address in its register, and may have nothing on the stack.
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
    """Return the caller's value of a register, or None if it is lost."""
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
