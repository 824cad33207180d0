"""
The RPN instruction set: one row for each encoded instruction.

The parser, checker, printer, encoder, interpreter and the language reference all read this table. Everything about an
instruction is here, except its effect (``vm/``). Numbers and operand widths are those of section 1.2 of the recovered
reference; the rows with ``since=OURS`` are additions and use numbers that the original left free.

A row's *syntax* is the statement as a user writes it. At most one operand is variable, in angle brackets::

    push lv, <lv>          operator "push", literal operand "lv", variable operand of kind LV

A row's *effect* is in the notation of Forth, top of stack rightmost. An item may be repeated: ``x*n`` by the
instruction's own operand, ``value*cells`` by the cells of the register, ``x*?`` by a number known only at run time.
"""

from __future__ import annotations

import re
from enum import Enum, IntEnum
from functools import cache
from typing import NamedTuple

from dprobes.rpn.word_arithmetic import limits

__all__ = [
    "ALIASES",
    "CALL_DEPTH_MAX",
    "DEFAULT_EXCEPTION_MASK",
    "EX_LOGMAX",
    "HANDLER_DISPATCH_MAX",
    "HEAPMAX",
    "ITEM_PREFIX_SIZE",
    "JMPMAX",
    "KERNEL_FRAMES_MAX",
    "LOGMAX",
    "LOG_WIDTHS",
    "NAME_MAX",
    "NON_MASKABLE",
    "OURS",
    "PROCESS_NAME_SIZE",
    "RESERVED",
    "ROWS",
    "RPN_STACK_CELLS",
    "TEXT_MAX",
    "UNSEEN_ENTRY",
    "USER_FRAMES_MAX",
    "VERSION",
    "Alias",
    "ExceptionCode",
    "Flow",
    "Group",
    "OperandKind",
    "Row",
    "StackEnd",
    "Token",
    "free_opcodes",
    "rows_by_opcode",
    "rows_by_syntax",
    "text_problem",
]

RPN_STACK_CELLS = 1024
CALL_DEPTH_MAX = 32
HANDLER_DISPATCH_MAX = 256
"""Maximum number of exceptions that are dispatched to handlers in one hit (docs/reference/rpn.md, "Limits")."""

JMPMAX, LOGMAX, EX_LOGMAX, HEAPMAX = 256, 1024, 1024, 16384
"""
Default limits for one hit: the number of jumps, loops and calls, and the sizes in bytes of the log, trace and heap.
"""

KERNEL_FRAMES_MAX = 127
"""Maximum number of frames in a call stack from the kernel (PERF_MAX_STACK_DEPTH)."""

USER_FRAMES_MAX = KERNEL_FRAMES_MAX
"""Default maximum number of frames in a call stack of the probed process."""

NAME_MAX = limits(1)[1]
"""Maximum length in bytes of the name of an extension or a field: the encoding stores the length in one byte."""

TEXT_MAX = 200
"""Maximum size in bytes of a string that memory is compared with."""

PROCESS_NAME_SIZE = 16
"""Size in bytes of a process name in the kernel, trailing NULs included (TASK_COMM_LEN)."""

VERSION = 7
"""Version of the instruction set; it grows by one when an encoded instruction is added or changes its meaning."""

OURS = "dprobes 0.1"
"""The ``since`` of instructions and keywords that the original did not have."""


class ExceptionCode(IntEnum):
    """The exceptions by their numbers (man page, "RPN Exception Handling"; recovered reference 1.7)."""

    INVALID_ADDR = 0x0001
    SEG_FAULT = 0x0002
    JMP_MAX = 0x0004
    CALL_MAX = 0x0010
    DIVIDE_BY_ZERO = 0x0020
    INVALID_OPERAND = 0x0040
    INVALID_OPCODE = 0x0080
    HEAP_NOMEM = 0x0100
    HEAP_INVALID_HANDLE = 0x0200
    HEAP_INVALID_OFFSET = 0x0400
    LOG_OVERFLOW = 0x1000
    RPN_STACK_WRAP = 0x2000
    USER_EX = 0x8000


DEFAULT_EXCEPTION_MASK = 0x0FFF
NON_MASKABLE = 0x0FFF
"""Mask of the exception codes that end the handler unless they are enabled. Other codes are ignored if not enabled."""

UNSEEN_ENTRY = -4095
"""
Address that INVALID_ADDR reports if only the return of a call was seen and not its entry.

In a record it is truncated to the word. No mapping can have this address: it is -MAX_ERRNO, the lowest number that the
kernel returns as an error instead of an address.
"""

ITEM_PREFIX_SIZE = 3
"""The size in bytes of the prefix of a self-describing log item: its token, and its length in 16 bits."""

LOG_WIDTHS = {"log b, <count>": 1, "log w, <count>": 2, "log d, <count>": 4, "log <count>": 0}
"""The size in bytes of each number that an instruction logs, by the instruction's syntax; 0 means a word."""


class Token(IntEnum):
    """The prefixes of self-describing log items and of the parts of a stack trace (recovered reference 1.4)."""

    SELECTOR_FAULT = 0xFE
    ADDRESS_FAULT = 0xFF
    MEMORY = 0
    STRING = 1
    STACK_TRACE = 2
    FRAMES = 3
    STACK_ENTRIES = 4
    LOCAL_VARIABLES = 5
    GLOBAL_VARIABLES = 6
    STACK_COUNT = 7
    CPU_VARIABLES = 8
    KERNEL_STACK = 9
    USER_STACK = 10
    THREAD_VARIABLES = 11


class StackEnd(IntEnum):
    """
    The reason why the call stack of a process ends.

    From NO_TABLE on, the codes follow the last address in a logged stack: no code has addresses that low.
    """

    OUTERMOST = 0
    """The last frame has no caller."""
    LIMIT = 1
    """The stack has more frames than were requested."""
    NO_TABLE = 2
    """No unwind table covers the last address."""
    BAD_TABLE = 3
    """The unwind table of the last address is malformed or unsupported."""
    UNREADABLE = 4
    """The memory of the stack cannot be read."""
    NOT_RISING = 5
    """The address of the caller's frame is not above that of the called function's frame."""
    GONE = 6
    """The process ended before its stack was unwound."""
    NO_COPY = 7
    """The kernel's buffer had no room for a copy of the stack."""


class OperandKind(Enum):
    """The kinds of variable operand; the enum value is the spelling in a row's syntax."""

    LABEL = "label"
    PROCEDURE = "procname"
    VALUE = "value"
    REGISTER = "register"
    LV = "lv"
    GV = "gv"
    CV = "cv"
    TV = "tv"
    MAJOR = "major"
    MINOR = "minor"
    WORDS = "count"
    BITS = "bits"
    TIMES = "times"
    CELLS = "cells"
    DISPLACEMENT = "n"
    EXIT_CODE = "code"
    HEAP_COUNT = "values"
    EXTENSION = "name"
    FIELD = "field"
    FRAMES = "frames"
    TEXT = "text"
    TABLE = "table"
    ARGUMENT = "argument"
    COUNTER = "counter"

    @property
    def width(self) -> int:
        """The encoded width in bytes, or 0 for the module's word, -1 for a length byte and that number of bytes."""
        return _WIDTHS[self]

    @property
    def is_signed(self) -> bool:
        """True if the encoded operand is a two's complement number."""
        return self in (OperandKind.LABEL, OperandKind.PROCEDURE, OperandKind.DISPLACEMENT)

    @property
    def limits(self) -> tuple[int, int]:
        """Minimum and maximum (both included) of an encodable operand. Only kinds with a width have them."""
        return limits(self.width, is_signed=self.is_signed)


_WIDTHS = {
    OperandKind.LABEL: 0,
    OperandKind.PROCEDURE: 0,
    OperandKind.VALUE: 0,
    OperandKind.REGISTER: 2,
    OperandKind.LV: 2,
    OperandKind.GV: 2,
    OperandKind.CV: 2,
    OperandKind.TV: 2,
    OperandKind.MAJOR: 2,
    OperandKind.MINOR: 2,
    OperandKind.WORDS: 2,
    OperandKind.BITS: 1,
    OperandKind.TIMES: 1,
    OperandKind.CELLS: 1,
    OperandKind.DISPLACEMENT: 2,
    OperandKind.EXIT_CODE: 1,
    OperandKind.HEAP_COUNT: 2,
    OperandKind.EXTENSION: -1,
    OperandKind.FIELD: -1,
    OperandKind.FRAMES: 1,
    OperandKind.TEXT: -1,
    OperandKind.TABLE: 2,
    OperandKind.ARGUMENT: 1,
    OperandKind.COUNTER: 1,
}


class Flow(Enum):
    """The next instruction in the flow of control, exceptions apart."""

    NEXT = "the next instruction"
    JUMP = "the label"
    BRANCH = "the label or the next instruction"
    CALL = "the procedure, then the next instruction"
    RETURN = "the caller"
    RAISE = "an exception handler"
    END = "the end of the handler"


class Group(Enum):
    """The groups of the man page's section "Instruction set", in its order."""

    EXECUTION = "Execution"
    LOGGING = "Logging"
    LOCAL_VARIABLE = "Local variables"
    GLOBAL_VARIABLE = "Global variables"
    CPU_VARIABLE = "Per-CPU variables"
    THREAD_VARIABLE = "Per-thread variables"
    TABLE = "Keyed tables"
    ARITHMETIC = "Arithmetic and logic"
    STACK = "RPN stack"
    REGISTER = "Registers"
    DATA = "Data and memory"
    SYSTEM = "System variables"
    IO = "I/O ports"
    VERIFY = "Address verification"
    SEGMENT = "Segmented addresses"
    PHYSICAL = "Physical memory"
    EXCEPTION = "Exceptions"
    TRACE = "Stack traces"
    HEAP = "Heap"


class Row(NamedTuple):
    """
    A row of the table: an instruction and the exceptions it can raise.

    ``effect`` is in the notation of Forth. ``since`` is the version of the original that introduced the instruction.
    ``writes`` is True if the instruction needs ``--allow-write``.
    """

    opcode: int
    syntax: str
    effect: str
    group: Group
    doc: str
    faults: tuple[ExceptionCode, ...] = ()
    flow: Flow = Flow.NEXT
    since: str = "3.6"
    writes: bool = False

    @property
    def operator(self) -> str:
        """The first word of the syntax."""
        return self.syntax.partition(" ")[0]

    @property
    def operands(self) -> tuple[str | OperandKind, ...]:
        """The operands in order: a literal word, or the kind of the variable operand."""
        return _operands(self.syntax)

    @property
    def operand_kind(self) -> OperandKind | None:
        """The kind of the variable operand, None if the instruction has none."""
        return _operand_kind(self.syntax)

    def encoded_size(self, word_size: int, operand: object = None) -> int:
        """Return the length in bytes with the opcode; ``word_size`` is 4 or 8, ``operand`` matters only for strings."""
        kind = self.operand_kind
        if kind is None:
            return 1
        if kind.width < 0:
            return 2 + len(str(operand).encode())
        return 1 + (kind.width or word_size)


class Alias(NamedTuple):
    """An old spelling; ``canonical`` is its row's syntax, ``since`` the version that renamed it, empty if unknown."""

    syntax: str
    canonical: str
    since: str = "3.4.0"

    @property
    def operator(self) -> str:
        """The first word of the syntax."""
        return self.syntax.partition(" ")[0]

    @property
    def operands(self) -> tuple[str | OperandKind, ...]:
        """The operands in order, as in ``Row.operands``."""
        return _operands(self.syntax)


@cache
def _operands(syntax: str) -> tuple[str | OperandKind, ...]:
    _, _, rest = syntax.partition(" ")
    return tuple(
        OperandKind(part[1:-1]) if part.startswith("<") else part for part in re.split(r"\s*,\s*", rest) if part
    )


@cache
def _operand_kind(syntax: str) -> OperandKind | None:
    return next((o for o in _operands(syntax) if isinstance(o, OperandKind)), None)


def _variable_rows(
    first: int, operator: str, name: str, kind: str, immediate: str, popped: str, group: Group, doc: str,
    faults: tuple[ExceptionCode, ...], since: str = "3.6",
) -> tuple[Row, Row]:  # fmt: skip
    """
    Return the two rows of an instruction on variables: the index is an operand, or is popped from the stack.

    ``first`` is the opcode of the first row. ``immediate`` and ``popped`` are the documented stack effects of the rows.
    """
    return (
        Row(first, f"{operator} {name}, <{kind}>", immediate, group, doc, since=since),
        Row(first + 1, f"{operator} {name}", popped, group, f"{doc} The index is popped.", faults, since=since),
    )


def _variables(
    name: str, group: Group, what: str, push: int, pop: int, move: int, inc: int, dec: int, since: str
) -> tuple[Row, ...]:
    bad = (ExceptionCode.INVALID_OPERAND,)
    return (
        *_variable_rows(push, "push", name, name, "-- value", "index -- value", group, f"Push {what}.", bad, since),
        *_variable_rows(pop, "pop", name, name, "value --", "index value --", group, f"Pop a value into {what}.", bad, since),
        *_variable_rows(move, "move", name, name, "value -- value", "value index -- value", group,
                 f"Copy the top of the stack into {what}.", bad, since),
        *_variable_rows(inc, "inc", name, name, "--", "index --", group, f"Add one to {what}.", bad, since),
        *_variable_rows(dec, "dec", name, name, "--", "index --", group, f"Subtract one from {what}.", bad, since),
    )  # fmt: skip


_E = ExceptionCode
_ADDR = (_E.INVALID_ADDR,)
_OVERFLOW = (_E.LOG_OVERFLOW,)
_HEAP_ACCESS = (_E.HEAP_INVALID_HANDLE, _E.HEAP_INVALID_OFFSET)

_EXECUTION = (
    Row(0x00, "nop", "--", Group.EXECUTION, "Do nothing."),
    Row(0x01, "jmp <label>", "--", Group.EXECUTION, "Jump to the label.", (_E.JMP_MAX,), Flow.JUMP),
    Row(0x02, "jlt <label>", "x -- x", Group.EXECUTION, "Jump if the top of the stack, as a signed number, is < 0.", (_E.JMP_MAX,), Flow.BRANCH),
    Row(0x03, "jle <label>", "x -- x", Group.EXECUTION, "Jump if the top of the stack, as a signed number, is <= 0.", (_E.JMP_MAX,), Flow.BRANCH),
    Row(0x04, "jgt <label>", "x -- x", Group.EXECUTION, "Jump if the top of the stack, as a signed number, is > 0.", (_E.JMP_MAX,), Flow.BRANCH),
    Row(0x05, "jge <label>", "x -- x", Group.EXECUTION, "Jump if the top of the stack, as a signed number, is >= 0.", (_E.JMP_MAX,), Flow.BRANCH),
    Row(0x06, "jz <label>", "x -- x", Group.EXECUTION, "Jump if the top of the stack is 0.", (_E.JMP_MAX,), Flow.BRANCH),
    Row(0x07, "jnz <label>", "x -- x", Group.EXECUTION, "Jump if the top of the stack is not 0.", (_E.JMP_MAX,), Flow.BRANCH),
    Row(0x08, "loop <label>", "x -- x-1", Group.EXECUTION, "Decrement the top of the stack in place, and jump if the result is not 0. Every execution counts towards jmpmax.", (_E.JMP_MAX,), Flow.BRANCH),
    Row(0x09, "call <procname>", "--", Group.EXECUTION, "Call a procedure. SBP and the exception handler are saved.", (_E.CALL_MAX, _E.JMP_MAX), Flow.CALL),
    Row(0x0A, "ret", "--", Group.EXECUTION, "Return from a procedure. SBP is restored.", (_E.CALL_MAX,), Flow.RETURN),
    Row(0x0B, "abort", "--", Group.EXECUTION, "End the handler without a record.", (), Flow.END),
    Row(0x0C, "remove", "--", Group.EXECUTION, "End the handler with a record and remove the probepoint.", (), Flow.END),
    Row(0x0D, "exit", "--", Group.EXECUTION, "End the handler with a record.", (), Flow.END),
    Row(0x0E, "exit <code>", "--", Group.EXECUTION, "End the handler with a record, then perform the action of the code: 1 debugger, 2 crash dump, 3 core dump.", (_E.INVALID_OPERAND,), Flow.END),
    Row(0x58, "skip", "value --", Group.EXECUTION, "End the handler with a record. The function that begins at the probepoint is not executed; it returns the value.", (), Flow.END, since=OURS, writes=True),
    Row(0x8D, "callk", "--", Group.EXECUTION, "Call every registered extension in order of registration. INVALID_OPERAND(6, number) is raised if one fails.", (_E.INVALID_OPERAND,), since="3.0"),
    Row(0x99, "callk <name>", "--", Group.EXECUTION, "Call the registered extension of that name. INVALID_OPERAND(6, number) is raised if it fails.", (_E.INVALID_OPERAND,), since=OURS),
)  # fmt: skip

_LOGGING = (
    Row(0x11, "setmin <minor>", "--", Group.LOGGING, "Set the minor code of this hit's record."),
    Row(0x12, "setmin", "minor --", Group.LOGGING, "Pop a minor code and set it for this hit's record."),
    Row(0x13, "setmaj <major>", "--", Group.LOGGING, "Set the major code of this hit's record."),
    Row(0x14, "setmaj", "major --", Group.LOGGING, "Pop a major code and set it for this hit's record."),
    Row(0x15, "log str", "max address --", Group.LOGGING, "Log token 1, the length, and the string at address up to its NUL (not logged) or max bytes.", (_E.INVALID_ADDR, _E.LOG_OVERFLOW)),
    Row(0x17, "log mrf", "length address --", Group.LOGGING, "Log token 0, the length, and length bytes of memory at address.", (_E.INVALID_ADDR, _E.LOG_OVERFLOW)),
    Row(0x18, "log b, <count>", "x*n --", Group.LOGGING, "Pop count cells and log the low byte of each.", _OVERFLOW, since="1.0"),
    Row(0x19, "log w, <count>", "x*n --", Group.LOGGING, "Pop count cells and log the low 2 bytes of each.", _OVERFLOW, since="1.0"),
    Row(0x1A, "log d, <count>", "x*n --", Group.LOGGING, "Pop count cells and log the low 4 bytes of each.", _OVERFLOW, since="1.0"),
    Row(0x1B, "log <count>", "x*n --", Group.LOGGING, "Pop count cells and log each as a word, without prefix.", _OVERFLOW),
    Row(0x8A, "log", "x*? count --", Group.LOGGING, "Pop a count, then that many cells. Log token 7, the count, and the cells.", _OVERFLOW),
    Row(0x8B, "log lv", "start range --", Group.LOGGING, "Log token 5, range, and that many local variables from index start on.", (_E.INVALID_OPERAND, _E.LOG_OVERFLOW)),
    Row(0x8C, "log gv", "start range --", Group.LOGGING, "Log token 6, range, and that many global variables from index start on.", (_E.INVALID_OPERAND, _E.LOG_OVERFLOW)),
    Row(0x9A, "log cv", "start range --", Group.LOGGING, "Log token 8, range, and that many variables of the current CPU from index start on.", (_E.INVALID_OPERAND, _E.LOG_OVERFLOW), since=OURS),
    Row(0xEA, "log tv", "start range --", Group.LOGGING, "Log token 11, range, and that many variables of the thread from index start on.", (_E.INVALID_OPERAND, _E.LOG_OVERFLOW), since=OURS),
    Row(0xA9, "log kstack, <frames>", "--", Group.LOGGING, "Log token 9, the number of addresses, and up to frames addresses of the kernel's call stack.", _OVERFLOW, since=OURS),
    Row(0xAA, "log kstack", "--", Group.LOGGING, "Log the kernel's call stack, up to 127 addresses.", _OVERFLOW, since=OURS),
    Row(0xAB, "log ustack, <frames>", "--", Group.LOGGING, "Log token 10, the number of addresses, and up to frames addresses of the program's call stack. If the stack cannot be followed to its end, a reason code below 16 follows the last address.", _OVERFLOW, since=OURS),
    Row(0xAC, "log ustack", "--", Group.LOGGING, "Log the program's call stack, up to 127 addresses.", _OVERFLOW, since=OURS),
    Row(0x70, "push lp", "-- position", Group.LOGGING, "Push LP, the position of the next byte in the log buffer."),
    Row(0x71, "push plp", "-- position", Group.LOGGING, "Push PLP, the value that LP had before the last log instruction if that failed."),
    Row(0x72, "pop lp", "position --", Group.LOGGING, "Set LP to the popped position, for example to an earlier one, to discard a partial item. Bytes that this hit has not logged are 0.", _OVERFLOW),
)  # fmt: skip

_VARIABLES = (
    *_variables("lv", Group.LOCAL_VARIABLE, "a local variable", 0x29, 0x2B, 0x2D, 0x2F, 0x31, "3.6"),
    *_variables("gv", Group.GLOBAL_VARIABLE, "a global variable", 0x1F, 0x21, 0x23, 0x25, 0x27, "3.6"),
    *_variables("cv", Group.CPU_VARIABLE, "a variable of the current CPU", 0x9B, 0x9D, 0x9F, 0xA1, 0xA3, OURS),
    *_variables("tv", Group.THREAD_VARIABLE, "a variable of the thread", 0xE0, 0xE2, 0xE4, 0xE6, 0xE8, OURS),
)

_TABLES = (
    Row(0x55, "tally <table>", "keys value --", Group.TABLE, "Add a value to the entry of the keys; a table of kind 'count' takes no value. A value of more than one word takes several cells, its first one on top. Values whose keys find no room are counted as lost.", (ExceptionCode.INVALID_ADDR,), since=OURS),
    Row(0x56, "push table, <table>", "keys -- value", Group.TABLE, "Push the value of the keys' entry, or 0 if there is none; for 'stats' and histograms it is the count. A value of more than one word takes several cells, its first one on top.", (ExceptionCode.INVALID_ADDR,), since=OURS),
    Row(0x5B, "add table, <table>", "keys value --", Group.TABLE, "Add a number to the entry of the keys in a table of kind 'last' with numbers as values. User call stacks are no keys there. A value of more than one word takes several cells, its first one on top.", (ExceptionCode.INVALID_ADDR,), since=OURS),
    Row(0x57, "delete <table>", "keys --", Group.TABLE, "Delete the entry of the keys.", (ExceptionCode.INVALID_ADDR,), since=OURS),
)  # fmt: skip

_ARITHMETIC = (
    Row(0x33, "add", "a b -- a+b", Group.ARITHMETIC, "Add."),
    Row(0x34, "sub", "a b -- b-a", Group.ARITHMETIC, "Subtract the second cell from the top one."),
    Row(0x35, "mul", "a b -- a*b", Group.ARITHMETIC, "Multiply; the low word is kept."),
    Row(0x62, "div", "a b -- a%b a/b", Group.ARITHMETIC, "Divide unsigned. The divisor is on top; the quotient ends on top.", (_E.DIVIDE_BY_ZERO,)),
    Row(0x63, "idiv", "a b -- a%b a/b", Group.ARITHMETIC, "Divide signed, rounding towards zero. The divisor is on top; the quotient ends on top.", (_E.DIVIDE_BY_ZERO,)),
    Row(0x36, "neg", "a -- ~a", Group.ARITHMETIC, "Invert all bits (one's complement)."),
    Row(0x37, "and", "a b -- a&b", Group.ARITHMETIC, "Take the bitwise and."),
    Row(0x38, "or", "a b -- a|b", Group.ARITHMETIC, "Take the bitwise or."),
    Row(0x39, "xor", "a b -- a^b", Group.ARITHMETIC, "Take the bitwise exclusive or."),
    Row(0x3A, "rol <bits>", "a -- a", Group.ARITHMETIC, "Rotate left by that many bits."),
    Row(0x3B, "rol", "count a -- a", Group.ARITHMETIC, "Rotate the top cell left by the cell below it."),
    Row(0x3C, "ror <bits>", "a -- a", Group.ARITHMETIC, "Rotate right by that many bits."),
    Row(0x3D, "ror", "count a -- a", Group.ARITHMETIC, "Rotate the top cell right by the cell below it."),
    Row(0x3E, "shl <bits>", "a -- a", Group.ARITHMETIC, "Shift left; a count of the word's width or more gives 0."),
    Row(0x3F, "shl", "count a -- a", Group.ARITHMETIC, "Shift the top cell left by the cell below it."),
    Row(0x40, "shr <bits>", "a -- a", Group.ARITHMETIC, "Shift right and fill with zeros; a count of the word's width or more gives 0."),
    Row(0x41, "shr", "count a -- a", Group.ARITHMETIC, "Shift the top cell right by the cell below it, and fill with zeros."),
    Row(0x16, "eq", "a b -- b==a", Group.ARITHMETIC, "Push 1 if the two cells are equal, else 0.", since=OURS),
    Row(0x4A, "lt", "a b -- b<a", Group.ARITHMETIC, "Push 1 if the top cell is less than the second one in a signed comparison, else 0.", since=OURS),
    Row(0x4B, "ltu", "a b -- b<a", Group.ARITHMETIC, "Push 1 if the top cell is less than the second one in an unsigned comparison, else 0.", since=OURS),
    Row(0x64, "pbl", "a n -- a", Group.ARITHMETIC, "Copy bit n-1 into all bits to its left; n is on top.", (_E.INVALID_OPERAND,), since="2.0"),
    Row(0x66, "pbl <bits>", "a -- a", Group.ARITHMETIC, "Copy bit n-1 into all bits to its left.", (_E.INVALID_OPERAND,), since="2.0"),
    Row(0x65, "pbr", "a n -- a", Group.ARITHMETIC, "Copy bit n-1 into all bits to its right; n is on top.", (_E.INVALID_OPERAND,), since="2.0"),
    Row(0x67, "pbr <bits>", "a -- a", Group.ARITHMETIC, "Copy bit n-1 into all bits to its right.", (_E.INVALID_OPERAND,), since="2.0"),
    Row(0x68, "pzl", "a n -- a", Group.ARITHMETIC, "Clear all bits to the left of bit n-1; n is on top.", (_E.INVALID_OPERAND,), since="2.0"),
    Row(0x6A, "pzl <bits>", "a -- a", Group.ARITHMETIC, "Clear all bits to the left of bit n-1.", (_E.INVALID_OPERAND,), since="2.0"),
    Row(0x69, "pzr", "a n -- a", Group.ARITHMETIC, "Clear all bits to the right of bit n-1; n is on top.", (_E.INVALID_OPERAND,), since="2.0"),
    Row(0x6B, "pzr <bits>", "a -- a", Group.ARITHMETIC, "Clear all bits to the right of bit n-1.", (_E.INVALID_OPERAND,), since="2.0"),
)  # fmt: skip

_STACK = (
    Row(0x42, "xchg", "a b -- b a", Group.STACK, "Exchange the top two cells."),
    Row(0x43, "dup <times>", "x -- x x*n", Group.STACK, "Push that many more copies of the top cell."),
    Row(0x44, "dup", "count x -- x x*?", Group.STACK, "Pop a value and the count below it; push the value count+1 times."),
    Row(0x45, "ros <cells>", "x*n --", Group.STACK, "Drop that many cells.", since="3.0"),
    Row(0x78, "push sbp", "n -- value", Group.STACK, "Pop n; push the cell at SBP+n."),
    Row(0x79, "pop sbp", "n value --", Group.STACK, "Pop a value and n; store the value in the cell at SBP+n."),
    Row(0x7A, "push tsp", "n -- value", Group.STACK, "Pop n; push the cell at TSP+n, with TSP taken after n is popped."),
    Row(0x7B, "pop tsp", "n value --", Group.STACK, "Pop a value and n; store the value in the cell at TSP+n, with TSP taken after both are popped."),
    Row(0x7C, "push sbp, <n>", "-- value", Group.STACK, "Push the cell at SBP+n."),
    Row(0x7D, "pop sbp, <n>", "value --", Group.STACK, "Pop a value into the cell at SBP+n."),
    Row(0x7E, "push tsp, <n>", "-- value", Group.STACK, "Push the cell at TSP+n, with TSP taken before the instruction."),
    Row(0x7F, "pop tsp, <n>", "value --", Group.STACK, "Pop a value into the cell at TSP+n, with TSP taken before the instruction."),
    Row(0x80, "copy sbp, <n>", "value -- value", Group.STACK, "Copy the top cell to the cell at SBP+n."),
    Row(0x81, "copy tsp, <n>", "value -- value", Group.STACK, "Copy the top cell to the cell at TSP+n."),
    Row(0x88, "copy sbp", "value n -- value", Group.STACK, "Pop n; copy the top cell to the cell at SBP+n."),
    Row(0x89, "copy tsp", "value n -- value", Group.STACK, "Pop n; copy the top cell to the cell at TSP+n, with TSP taken after n is popped."),
    Row(0x84, "save sbp", "-- sbp", Group.STACK, "Push SBP."),
    Row(0x85, "restore sbp", "sbp --", Group.STACK, "Pop SBP."),
    Row(0x86, "save tsp", "-- tsp", Group.STACK, "Push TSP, as it was before the push."),
    Row(0x87, "restore tsp", "tsp --", Group.STACK, "Pop TSP."),
)  # fmt: skip

_REGISTER = (
    Row(0x46, "push r, <register>", "-- value*cells", Group.REGISTER, "Push a register of the current context, least significant cell on top.", _ADDR),
    Row(0x47, "pop r, <register>", "value --", Group.REGISTER, "Pop a value into a register of the current context. SEG_FAULT is raised for a selector that a segment register cannot hold.", (_E.SEG_FAULT,), writes=True),
    Row(0x48, "push u, <register>", "-- value*cells", Group.REGISTER, "Push a register of the user context, least significant cell on top.", _ADDR),
    Row(0x49, "pop u, <register>", "value --", Group.REGISTER, "Pop a value into a register of the user context. SEG_FAULT is raised as by pop r.", (_E.SEG_FAULT,), writes=True),
)  # fmt: skip

_DATA = (
    Row(0x4C, "push <value>", "-- value", Group.DATA, "Push a number, or the run-time address of a symbol of the module."),
    *(
        Row(0x4D + n, f"push mem, u{8 << n}", "address -- value*cells", Group.DATA, f"Pop an address and push the {8 << n} bits at it, least significant cell on top.", _ADDR)
        for n in range(4)
    ),
    *(
        Row(0x51 + n, f"pop mem, u{8 << n}", "address value*cells --", Group.DATA, f"Pop a value and the address below it; store {8 << n} bits.", _ADDR, writes=True)
        for n in range(4)
    ),
    Row(0xEC, "match str, <text>", "address -- differs", Group.DATA, "Push 0 if the string at address, up to its NUL, equals the text, else 1. At most one byte more than the text's length is read.", _ADDR, since=OURS),
    Row(0xED, "match strn, <text>", "address -- differs", Group.DATA, "Push 0 if the string at address begins with the text, else 1. No more bytes than the text's length are read.", _ADDR, since=OURS),
)  # fmt: skip

_SYSTEM = (
    Row(0x5D, "push task", "-- address", Group.SYSTEM, "Push the address of the task_struct of the thread, in the kernel."),
    Row(0x5E, "push pid", "-- pid", Group.SYSTEM, "Push the process id."),
    Row(0x5F, "push procid", "-- cpu", Group.SYSTEM, "Push the number of the CPU."),
    Row(0x90, "push wid", "-- bits", Group.SYSTEM, "Push the word's width in bits: positive for big endian, negative for little endian.", since="5.0"),
    Row(0xA5, "push tid", "-- tid", Group.SYSTEM, "Push the thread id.", since=OURS),
    Row(0xA6, "push uid", "-- uid", Group.SYSTEM, "Push the real user id.", since=OURS),
    Row(0xA8, "push tp, <field>", "-- value", Group.SYSTEM, "Push a field of the tracepoint or system call that was hit; for an array, its address.", _ADDR, since=OURS),
    Row(0xEB, "push comm", "-- name*cells", Group.SYSTEM, "Push the name of the process as 16 bytes, padded with zeros, the first bytes on top.", since=OURS),
    Row(0xEE, "match comm, <text>", "-- differs", Group.SYSTEM, "Push 0 if the name of the process equals the text, else 1.", since=OURS),
    Row(0xEF, "match commn, <text>", "-- differs", Group.SYSTEM, "Push 0 if the name of the process begins with the text, else 1.", since=OURS),
    Row(0xAF, "push usdt, <argument>", "-- value", Group.SYSTEM, "Push an argument of the USDT probe that was hit, counted from 1, with the size and sign in the probe's note.", _ADDR, since=OURS),
    Row(0xAD, "push elapsed", "-- elapsed*cells", Group.SYSTEM, "Push the nanoseconds from the entry of the returning call to this hit, 64 bits, least significant cell on top. INVALID_ADDR is raised if the entry was not seen.", _ADDR, since=OURS),
    Row(0xAE, "push entry, <register>", "-- value", Group.SYSTEM, "Push a general register as it was at the entry of the returning call. INVALID_ADDR is raised if the entry was not seen.", _ADDR, since=OURS),
    Row(0x59, "push pmc, <counter>", "-- value*cells", Group.SYSTEM, "Push a performance counter of the thread, 64 bits, least significant cell on top. INVALID_OPERAND(8, number) is raised if it cannot be read. Only differences of two readings have a meaning.", (_E.INVALID_OPERAND,), since=OURS),
    Row(0x5A, "push elapsed, <counter>", "-- count*cells", Group.SYSTEM, "Push the increase of a counter since the entry of the returning call, 64 bits, least significant cell on top. INVALID_ADDR is raised if the entry was not seen, INVALID_OPERAND(8, number) if the counter cannot be read.", (_E.INVALID_ADDR, _E.INVALID_OPERAND), since=OURS),
    Row(0xA7, "push time", "-- time*cells", Group.SYSTEM, "Push CLOCK_MONOTONIC in nanoseconds, 64 bits, least significant cell on top.", since=OURS),
)  # fmt: skip

_IO = (
    *(
        Row(0xB1 + n, f"push io, u{8 << n}", "port -- value", Group.IO, f"Pop a port and push the {8 << n} bits read from it.", writes=True)
        for n in range(3)
    ),
    *(
        Row(0xB4 + n, f"pop io, u{8 << n}", "port value --", Group.IO, f"Pop a value and the port below it; write {8 << n} bits.", writes=True)
        for n in range(3)
    ),
)  # fmt: skip

_VERIFY = (
    Row(0x60, "vfyr", "address -- invalid", Group.VERIFY, "Push 0 if the byte at address can be read, else 1."),
    Row(0x61, "vfyrw", "address -- invalid", Group.VERIFY, "Push 0 if the byte at address can be read and written, else 1. Nothing is written."),
)  # fmt: skip

_SEGMENT = (
    Row(0xB0, "seg2lin", "selector offset -- address", Group.SEGMENT, "Convert a segmented address into a flat one.", (_E.SEG_FAULT,)),
    Row(0xB7, "log mrs", "length selector offset --", Group.SEGMENT, "As log mrf, with a segmented address.", (_E.INVALID_ADDR, _E.SEG_FAULT, _E.LOG_OVERFLOW), since="1.0"),
    Row(0xB8, "log ars", "max selector offset --", Group.SEGMENT, "As log str, with a segmented address.", (_E.INVALID_ADDR, _E.SEG_FAULT, _E.LOG_OVERFLOW), since="1.0"),
    *(
        Row(0xB9 + n, f"push {letter}is", "selector offset -- value", Group.SEGMENT, f"As push mem, u{8 << n}, with a segmented address.", (_E.INVALID_ADDR, _E.SEG_FAULT), since="1.0")
        for n, letter in enumerate("bwd")
    ),
    *(
        Row(0xBC + n, f"pop {letter}is", "selector offset value --", Group.SEGMENT, f"As pop mem, u{8 << n}, with a segmented address.", (_E.INVALID_ADDR, _E.SEG_FAULT), since="1.0", writes=True)
        for n, letter in enumerate("bwd")
    ),
    Row(0xBF, "vsa", "selector offset -- invalid", Group.SEGMENT, "As vfyr, with a segmented address.", since="1.0"),
)  # fmt: skip

_PHYSICAL = (
    *(
        Row(0xC0 + n, f"push phys, u{8 << n}", "address -- value*cells", Group.PHYSICAL, f"As push mem, u{8 << n}, with a physical address.", _ADDR, since=OURS)
        for n in range(4)
    ),
    *(
        Row(0xC4 + n, f"pop phys, u{8 << n}", "address value*cells --", Group.PHYSICAL, f"As pop mem, u{8 << n}, with a physical address.", _ADDR, since=OURS, writes=True)
        for n in range(4)
    ),
    Row(0xC8, "log mrp", "length address --", Group.PHYSICAL, "As log mrf, with a physical address.", (_E.INVALID_ADDR, _E.LOG_OVERFLOW), since=OURS),
    Row(0xC9, "lin2phys", "address -- physical", Group.PHYSICAL, "Convert an address into the physical address of the same byte, by the page tables of the hit's processor. INVALID_ADDR is raised if no page is mapped there.", _ADDR, since=OURS),
)  # fmt: skip

_EXCEPTION = (
    Row(0x6C, "sx <label>", "--", Group.EXCEPTION, "Set the exception handler of this call frame. It is used once."),
    Row(0x6D, "ux", "--", Group.EXCEPTION, "Clear the exception handler of this call frame."),
    Row(0x6E, "rx", "parm2 parm1 code -- parm2 parm1 code", Group.EXCEPTION, "Raise the exception on top of the stack, regardless of ex_mask.", (_E.USER_EX,), Flow.RAISE),
    Row(0x6F, "push x", "-- parm2 parm1 code", Group.EXCEPTION, "Push the last exception, or zeros if there was none."),
)  # fmt: skip

_TRACE = (
    Row(0x73, "log st", "--", Group.TRACE, "Write the call stack to the stack-trace buffer."),
    Row(0x74, "purge st", "--", Group.TRACE, "Empty the stack-trace buffer."),
    Row(0x75, "trace lv", "index range --", Group.TRACE, "Include range local variables from index on in traces of this call frame.", (_E.INVALID_OPERAND,)),
    Row(0x76, "trace gv", "index range --", Group.TRACE, "Include range global variables from index on in traces of this call frame.", (_E.INVALID_OPERAND,)),
    Row(0x77, "trace pv", "index range --", Group.TRACE, "Include range RPN stack cells from cell index on in traces of this call frame."),
    Row(0x82, "push stp", "-- position", Group.TRACE, "Push STP, the position of the next byte in the stack-trace buffer."),
    Row(0x83, "pop stp", "position --", Group.TRACE, "Set STP to the popped position. Bytes that no trace of this hit has written are 0.", _OVERFLOW),
)  # fmt: skip

_HEAP = (
    Row(0x8E, "malloc", "size -- handle", Group.HEAP, "Allocate size bytes, filled with zeros, from this hit's heap.", (_E.HEAP_NOMEM,), since="5.0"),
    Row(0x8F, "free", "handle --", Group.HEAP, "Free a block of the heap.", (_E.HEAP_INVALID_HANDLE,), since="5.0"),
    *(
        Row(0x91 + n, f"push h, u{8 << n}, <values>", "handle offset -- value*?", Group.HEAP, f"Push that many {8 << n}-bit values of a block from offset on, the first on top.", _HEAP_ACCESS, since="5.0")
        for n in range(4)
    ),
    *(
        Row(0x95 + n, f"pop h, u{8 << n}, <values>", "value*? handle offset --", Group.HEAP, f"Pop that many {8 << n}-bit values into a block from offset on, the first from the top.", _HEAP_ACCESS, since="5.0")
        for n in range(4)
    ),
)  # fmt: skip

ROWS: tuple[Row, ...] = (
    *_EXECUTION,
    *_LOGGING,
    *_VARIABLES,
    *_TABLES,
    *_ARITHMETIC,
    *_STACK,
    *_REGISTER,
    *_DATA,
    *_SYSTEM,
    *_IO,
    *_VERIFY,
    *_SEGMENT,
    *_PHYSICAL,
    *_EXCEPTION,
    *_TRACE,
    *_HEAP,
)

RESERVED: tuple[tuple[range, str], ...] = (
    (range(0x0F, 0x11), "the original's 'suspend' and 'resume', which were never executed"),
    (range(0x1C, 0x1F), "the original's 'alloc gv' and 'free gv', which were never executed"),
    (range(0xF1, 0x100), "the first bytes of two-byte codes"),
)
"""The opcodes without a row that must not be assigned, with the reason (recovered reference 1.2)."""

ALIASES: tuple[Alias, ...] = (
    Alias("log arf", "log str"),
    Alias("push b, <value>", "push <value>"),
    Alias("push w, <value>", "push <value>"),
    Alias("push d, <value>", "push <value>"),
    Alias("push bif", "push mem, u8"),
    Alias("push wif", "push mem, u16"),
    Alias("push dif", "push mem, u32"),
    Alias("push qif", "push mem, u64"),
    Alias("pop bif", "pop mem, u8"),
    Alias("pop wif", "pop mem, u16"),
    Alias("pop dif", "pop mem, u32"),
    Alias("pop qif", "pop mem, u64"),
    Alias("vfa", "vfyr"),
    Alias("cnvrt sxf", "seg2lin"),
    Alias("call_kmod", "callk", since="3.1"),
    Alias("push <register>", "push r, <register>", since=""),
    Alias("pop <register>", "pop r, <register>", since=""),
)

REJECTED: tuple[tuple[str, str], ...] = (
    ("cnvrt sxd", "'cnvrt sxd' was removed in version 3.4.0 and has no successor"),
    ("suspend", "'suspend' was reserved and never executed"),
    ("resume", "'resume' was reserved and never executed"),
    ("alloc gv", "'alloc gv' was reserved and never executed; write gvars = <n> in the file header"),
    ("free gv", "'free gv' was reserved and never executed; global variables outlive the programs"),
)
"""Statements of versions of the original that are rejected, each with the error message."""


def text_problem(text: str) -> str | None:
    """Return the error message for a string with which memory cannot be compared, or None if the string is valid."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return "a text is one of UTF-8"
    if size > TEXT_MAX:
        return f"a text has at most {TEXT_MAX} bytes"
    if not text.isprintable():
        return "a text has no control characters"
    return None


def free_opcodes() -> list[int]:
    """Return the unassigned opcodes in ascending order; 0xb0 to 0xdf are for instructions of certain machines only."""
    taken = {row.opcode for row in ROWS}.union(*(opcodes for opcodes, _ in RESERVED))
    return [opcode for opcode in range(0x100) if opcode not in taken]


@cache
def rows_by_opcode() -> dict[int, Row]:
    """Return the rows of the instruction table, keyed by opcode."""
    return {row.opcode: row for row in ROWS}


@cache
def rows_by_syntax() -> dict[str, Row]:
    """Return the rows of the instruction table by syntax, such as "push mem, u8", without old spellings."""
    return {row.syntax: row for row in ROWS}
