"""
``key = value`` statements of the two headers, with one row for each keyword.

The parser, the printer and the language reference read this table. Sources: man page, "Probe Program File Header" and
"Probe-Point Header"; recovered reference 2.1 for the keywords that the man page lost.
"""

from __future__ import annotations

import re
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, assert_never

from dprobes.globs import is_pattern
from dprobes.rpn.instruction_set import DEFAULT_EXCEPTION_MASK, EX_LOGMAX, HEAPMAX, JMPMAX, LOGMAX, OURS
from dprobes.rpn.rpn_program import Address, Expression, Glob, Instruction, Offset, Sampler, Tracepoint, Usdt, quoted
from dprobes.rpn.word_arithmetic import limits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.rpn.rpn_program import Code, Location, ProbeDefinition, Program

__all__ = [
    "KEYWORDS",
    "KEYWORD_ALIASES",
    "LOGMAX_MAX",
    "Header",
    "Keyword",
    "ValueKind",
    "keywords_of",
    "location_keyword",
    "print_header",
    "print_instruction",
    "print_program",
]

LOGMAX_MAX = 0xFFFF
"""Maximum size of a log buffer in bytes."""

TVARS_MAX = 1024
"""Maximum number of variables of a thread: an engine has room for some thousands of threads at once."""

U16, U32, S32 = limits(2)[1], limits(4)[1], limits(4, is_signed=True)[1]


class Header(Enum):
    """Kind of header to which a keyword belongs: the file header, or the header of a probepoint."""

    FILE = "the file header"
    POINT = "a probepoint header"


class ValueKind(Enum):
    """The form of a header statement's value; the enum value describes it in an error message."""

    MODULE = "a module name, in double quotes unless it is made of letters and digits only"
    MODTYPE = "user, kernel, kmod or tracepoint"
    NUMBER = "a number"
    BOOLEAN = "yes or no"
    NAMES = "names separated by blanks"
    NAME = "a name"
    LOCATION = "a number, a symbol expression, a pattern, a tracepoint, or a USDT probe"
    RANGE = "an address, or two with ':' between them"
    ACCESS = "x, w, rw, io, in or out"
    SAMPLING = "a number of samples a second, such as 100hz, or of events of a counter, such as 1000 page-faults"
    WORD_SIZE = "4 or 8"
    TABLE = "NAME, KIND, KEY, ... [, room = N] [, unit = UNIT]"
    PATCH = "an object and a function in it, OBJECT:SYMBOL, in double quotes"


class Keyword(NamedTuple):
    """
    Statement of a header.

    ``field`` is the attribute of ``Program`` or ``ProbeDefinition`` that stores the value. ``default`` is the value
    without the statement. ``minimum`` and ``maximum`` (both included) bound a number.
    """

    name: str
    header: Header
    kind: ValueKind
    doc: str
    default: int | bool | str | None = None
    minimum: int = 0
    maximum: int = U32
    since: str = "3.6"
    field: str = ""
    is_repeated: bool = False
    """True if each statement adds to the value, a tuple."""

    @property
    def attribute(self) -> str:
        """The name of the dataclass field."""
        return self.field or self.name


_F, _P = Header.FILE, Header.POINT

KEYWORDS: tuple[Keyword, ...] = (
    Keyword("name", _F, ValueKind.MODULE, "The module to probe: a program, shared library, kernel or kernel module."),
    Keyword("modtype", _F, ValueKind.MODTYPE, "Type of the module: a program or library, the running kernel, a "
            "kernel module, or the kernel's tracepoints and system calls.", "user"),
    Keyword("wordsize", _F, ValueKind.WORD_SIZE, "Word size in bytes, 4 or 8, of the modules that the program "
            "is for; by default both. The compiler of DProbes C writes it if a handler depends on the word size.",
            since=OURS, field="word_size"),
    Keyword("major", _F, ValueKind.NUMBER, "Major code of every record.", 0, 0, U16),
    Keyword("id", _F, ValueKind.NUMBER, "A number of your choice, shown in stack traces.", 0, 0, U16),
    Keyword("vars", _F, ValueKind.NUMBER, "Number of local variables of the program.", 0, 0, 65536),
    Keyword("gvars", _F, ValueKind.NUMBER, "Number of global variables that the program uses.", 0, 0, 65536),
    Keyword("cvars", _F, ValueKind.NUMBER, "Number of variables of each CPU.", 0, 0, 65536, since=OURS),
    Keyword("tvars", _F, ValueKind.NUMBER, "Number of variables of each thread.", 0, 0, TVARS_MAX, since=OURS),
    Keyword("table", _F, ValueKind.TABLE, "A keyed table; may be given several times.", None, since=OURS,
            field="tables", is_repeated=True),
    Keyword("jmpmax", _F, ValueKind.NUMBER, "Largest number of jumps, loops and calls in one hit.", JMPMAX, 0, U16),
    Keyword("logmax", _F, ValueKind.NUMBER, "Size of the log buffer in bytes.", LOGMAX, 1, LOGMAX_MAX),
    Keyword("ex_logmax", _F, ValueKind.NUMBER, "Size of the stack-trace buffer in bytes.", EX_LOGMAX, 1, U16),
    Keyword("heapmax", _F, ValueKind.NUMBER, "Size of a hit's heap in bytes, if the probepoint has no heap =.",
            HEAPMAX, 40, U16, since="5.0"),
    Keyword("autostacktrace", _F, ValueKind.BOOLEAN, "Take a stack trace at every exception.", default=False),
    Keyword("logonfault", _F, ValueKind.BOOLEAN, "Keep the record even if the probed instruction faults.",
            default=False),
    Keyword("groupdef", _F, ValueKind.NAMES, "Names of groups for probepoints.", since="3.0", field="groups"),
    Keyword("typedef", _F, ValueKind.NAMES, "Names of types for probepoints.", since="3.0", field="types"),
    Keyword("offset", _P, ValueKind.LOCATION, "Location of the probepoint; starts a probe definition. Not with "
            "address. A tracepoint is SUBSYSTEM:NAME, a system call syscall:NAME, a USDT probe usdt:PROVIDER:NAME.",
            field="location"),
    Keyword("address", _P, ValueKind.RANGE, "Range to watch, or an address in the kernel; starts a probe definition.",
            field="location"),
    Keyword("sampler", _P, ValueKind.SAMPLING, "Samples a second on each CPU, or the number of a counter's events on "
            "a CPU from one sample to the next; starts a probe definition.",
            None, 1, 10_000, since=OURS, field="location"),
    Keyword("opcode", _P, ValueKind.NUMBER, "First byte of the probed instruction, checked before insertion.",
            None, *limits(1)),
    Keyword("minor", _P, ValueKind.NUMBER, "Minor code of the probepoint's records.", 0, 0, U16),
    Keyword("watchpoint", _P, ValueKind.ACCESS, "Watch a range of memory, or of I/O ports (io, in, out), for this "
            "kind of access."),
    Keyword("group", _P, ValueKind.NAME, "Group of the probepoint.", since="3.0"),
    Keyword("type", _P, ValueKind.NAMES, "Types of the probepoint.", since="3.0", field="types"),
    Keyword("passcount", _P, ValueKind.NUMBER, "Number of hits to skip before the handler first runs.", 0, 0, S32),
    Keyword("maxhits", _P, ValueKind.NUMBER, "Number of hits after which the probepoint is disabled; 0 means no limit.",
            0, 0, S32),
    Keyword("logonfault", _P, ValueKind.BOOLEAN, "Override logonfault of the file header for this probepoint."),
    Keyword("ex_mask", _P, ValueKind.NUMBER, "Enabled exceptions, one bit each.",
            DEFAULT_EXCEPTION_MASK, 0, U16, field="exception_mask"),
    Keyword("heap", _P, ValueKind.NUMBER, "Size of a hit's heap in bytes.", None, 0, U16, since="5.0"),
    Keyword("return", _P, ValueKind.BOOLEAN, "Run the handler just after the function or system call at offset "
            "has returned.",
            default=False, since=OURS, field="at_return"),
    Keyword("patch", _P, ValueKind.PATCH, "Replace the function at offset by the function SYMBOL of the shared object "
            "OBJECT; the probepoint has no handler.", None, since=OURS),
    Keyword("persist", _P, ValueKind.BOOLEAN, "Leave the patch in the process at the end of the run.",
            default=False, since=OURS, field="persists"),
    Keyword("idle", _P, ValueKind.NUMBER, "Number of seconds to wait until no thread has a frame in the function to be "
            "patched; without it, the patch is inserted at once.", None, 1, 3600, since=OURS),
    Keyword("replace", _P, ValueKind.BOOLEAN, "Let the patch call the original function, although the function is "
            "patched already.", default=False, since=OURS, field="is_replacing"),
)  # fmt: skip

KEYWORD_ALIASES = {
    "max_hits": "maxhits",
    "pass_count": "passcount",
    "exmask": "ex_mask",
    "exlogmax": "ex_logmax",
    "log_on_fault": "logonfault",
}
"""Old spellings of keywords, each with the current one, which the printer writes."""

LOCATION_KEYWORDS = ("offset", "address", "sampler")
"""Keywords that start a probe definition."""


@cache
def keywords_of(header: Header) -> dict[str, Keyword]:
    """Return the keywords of one header, keyed by name."""
    return {keyword.name: keyword for keyword in KEYWORDS if keyword.header is header}


_PLAIN_SYMBOL = re.compile(r"[A-Za-z_$.][A-Za-z0-9_$.@]*")


def print_program(program: Program) -> str:
    """Return the source text of a program, with a final line end."""
    lines = [*_header(program, Header.FILE)]
    for procedure in program.procedures:
        lines += ["", f"proc {procedure.name}", *_code(procedure.code), "endproc"]
    for definition in program.definitions:
        lines += ["", *_header(definition, Header.POINT), *_code(definition.handler)]
    return "\n".join(lines) + "\n"


def print_header(section: Program | ProbeDefinition) -> list[str]:
    """Return the lines of a program's file header or of a definition's probepoint header."""
    return list(_header(section, Header.POINT if hasattr(section, "location") else Header.FILE))


def print_instruction(instruction: Instruction) -> str:
    """Return an instruction as in RPN source, with its operand."""
    if isinstance(instruction.operand, Expression):
        return f"push {_operand_expression(instruction.operand)}"
    return str(instruction)


def _header(section: Program | ProbeDefinition, header: Header) -> Iterator[str]:
    for keyword in keywords_of(header).values():
        value = getattr(section, keyword.attribute)
        if keyword.attribute == "location":
            if keyword.name == location_keyword(value):
                yield f"{keyword.name} = {_text(value)}"
        elif keyword.is_repeated:
            yield from (f"{keyword.name} = {each}" for each in value)
        elif keyword.name == "name" or (keyword.kind is ValueKind.PATCH and value is not None):
            yield f"{keyword.name} = {quoted(value)}"
        elif value not in ((), None, keyword.default) and getattr(value, "value", value) != keyword.default:
            yield f"{keyword.name} = {_text(value)}"


def location_keyword(location: Location) -> str:
    """Return the keyword of the header statement for a location, such as ``offset`` or ``watchpoint``."""
    match location:
        case Address():
            return "address"
        case Sampler():
            return "sampler"
        case Offset() | Glob() | Tracepoint() | Usdt():
            return "offset"
        case _:
            assert_never(location)


def _text(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case int():
            return str(value) if value < 10 else hex(value)
        case tuple():
            return " ".join(value)
        case Offset(Expression(0, str(symbol))) if is_pattern(symbol):
            return f"({quoted(symbol)})"  # the parentheses mark a symbol, not a pattern
        case Offset(expression):
            return _expression(expression)
        case Glob(pattern):
            return quoted(pattern)
        case Address(low, None):
            return _expression(low)
        case Address(low, Expression() as high):
            return f"{_expression(low)} : {_expression(high)}"
        case Sampler() | Tracepoint():
            return str(value)
        case Usdt():
            return quoted(str(value)) if value.is_pattern else str(value)
        case _:
            return str(getattr(value, "value", value))


def _expression(expression: Expression) -> str:
    if expression.symbol is None or _PLAIN_SYMBOL.fullmatch(expression.symbol):
        return str(expression)
    return str(Expression(expression.addend, quoted(expression.symbol)))


def _operand_expression(expression: Expression) -> str:
    # Parentheses mark a symbol that has the name of a register or a literal operand, such as "pid".
    text = _expression(expression)
    return text if expression.symbol is None else f"({text})"


def _code(code: Code) -> Iterator[str]:
    labels: dict[int, list[str]] = {}
    for label, index in code.labels.items():
        labels.setdefault(index, []).append(label)
    for index, instruction in enumerate(code.instructions):
        yield from (f"{label}:" for label in labels.get(index, ()))
        yield f"    {print_instruction(instruction)}"
