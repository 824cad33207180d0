"""
Probe programs as data, shared by the languages, the compiled file, the interpreter and the code generators.

All classes are frozen and compare by value. Spans exist for messages and do not take part in comparisons, so that
``parse(print(program)) == program``. Registers and labels are names here; ``encode`` turns them into numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from dprobes.diagnostics import Diagnostics, did_you_mean
from dprobes.globs import is_pattern
from dprobes.rpn.instruction_set import DEFAULT_EXCEPTION_MASK, EX_LOGMAX, HEAPMAX, JMPMAX, LOGMAX, OperandKind, Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dprobes.arch.usdt_arguments import Argument
    from dprobes.rpn.keyed_tables import Table
    from dprobes.source_text import Span

__all__ = [
    "MAX_INSTRUCTIONS",
    "Access",
    "AccessCheck",
    "Address",
    "Code",
    "Expression",
    "Glob",
    "Instruction",
    "Location",
    "ModuleType",
    "Offset",
    "Operand",
    "Point",
    "ProbeDefinition",
    "Procedure",
    "Program",
    "Sampler",
    "Tracepoint",
    "Usdt",
    "calls_extensions",
    "joined_program",
    "quoted",
    "select",
    "select_all",
    "split_patch",
    "without_opcodes",
]

MAX_INSTRUCTIONS = 1_000_000
"""Maximum number of instructions in a program; no person or compiler writes more for a probe."""


class ModuleType(Enum):
    """The kind of module that is probed (``modtype =``)."""

    USER = "user"
    KERNEL = "kernel"
    KMOD = "kmod"
    TRACEPOINT = "tracepoint"


class Access(Enum):
    """The accesses that hit a watchpoint (``watchpoint =``)."""

    EXECUTE = "x"
    WRITE = "w"
    READ_WRITE = "rw"
    IO = "io"
    INPUT = "in"
    OUTPUT = "out"

    @property
    def is_of_ports(self) -> bool:
        """True if the accesses are to I/O ports, not to memory."""
        return self in (Access.IO, Access.INPUT, Access.OUTPUT)


@dataclass(frozen=True, slots=True)
class Expression:
    """A number, or the run-time address of ``symbol`` plus ``addend`` if ``symbol`` is not None."""

    addend: int
    symbol: str | None = None

    def __str__(self) -> str:
        if self.symbol is None:
            return hex(self.addend) if self.addend > 9 else str(self.addend)
        if not self.addend:
            return self.symbol
        return f"{self.symbol} {'+' if self.addend > 0 else '-'} {hex(abs(self.addend))}"


@dataclass(frozen=True, slots=True)
class Offset:
    """The place of a probepoint in the module: a file offset, or a symbol of the module plus or minus a number."""

    expression: Expression


@dataclass(frozen=True, slots=True)
class Glob:
    """A pattern that places a probepoint at every function with a matching name (not in the original)."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Address:
    """
    An absolute address of a probepoint.

    ``high`` is the last byte of the range of a watchpoint, None if it has no range.
    """

    low: Expression
    high: Expression | None = None


@dataclass(frozen=True, slots=True)
class Sampler:
    """
    A sampler, whose hits are in the code of the module (not in the original).

    ``counter`` None: it samples each CPU ``number`` times a second. Otherwise it takes a sample at each ``number``-th
    event of this performance counter on a CPU, whatever threads the events belong to.
    """

    number: int
    counter: str | None = None

    def __str__(self) -> str:
        return f"{self.number}hz" if self.counter is None else f"{self.number} {self.counter}"


SYSTEM_CALLS = "syscall"
"""Subsystem of a ``Tracepoint`` that is a system call."""


@dataclass(frozen=True, slots=True)
class Tracepoint:
    """A tracepoint of the kernel, or a system call if the subsystem is SYSTEM_CALLS (not in the original)."""

    subsystem: str
    name: str

    def __str__(self) -> str:
        return f"{self.subsystem}:{self.name}"

    @property
    def is_system_call(self) -> bool:
        """True if the tracepoint is the entry of a system call, or its exit with 'return = yes'."""
        return self.subsystem == SYSTEM_CALLS


@dataclass(frozen=True, slots=True)
class Usdt:
    """The sites of the module's USDT probes with this provider and name; both may be patterns (not in the original)."""

    provider: str
    name: str

    def __str__(self) -> str:
        return f"usdt:{self.provider}:{self.name}"

    @property
    def is_pattern(self) -> bool:
        """True if the provider or the name is a pattern, so that several probes may match."""
        return is_pattern(self.provider) or is_pattern(self.name)


Location = Offset | Glob | Address | Sampler | Tracepoint | Usdt

Operand = None | int | str | Expression
"""None, a number, a name (label, procedure, register, extension), or the value of ``push``."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """A row of the instruction table with its variable operand; ``operand_span`` is the place of the operand alone."""

    row: Row
    operand: Operand = None
    span: Span | None = field(default=None, compare=False, repr=False)
    operand_span: Span | None = field(default=None, compare=False, repr=False)

    @property
    def operand_place(self) -> Span | None:
        """
        Span to underline if the operand is wrong: the operand, or else the whole instruction.

        None means that the instruction has no place in a source.
        """
        return self.operand_span or self.span

    def __str__(self) -> str:
        kind = self.row.operand_kind
        if kind is None:
            return self.row.syntax
        operand = self.operand
        if kind is OperandKind.TEXT:
            return self.row.syntax.replace(f"<{kind.value}>", quoted(str(operand)))
        text = hex(operand) if isinstance(operand, int) and operand > 9 else str(operand)
        return self.row.syntax.replace(f"<{kind.value}>", text)


class AccessCheck(NamedTuple):
    """
    Condition on the memory that the probed instruction accesses: an execution is a hit if a byte is in a range.

    The range has ``length`` bytes from the link address ``first`` on, or from an address of processes if ``absolute``.
    ``instruction`` is the link address of the instruction. ``push r, accessed`` gives the distance of the accessed
    memory from the first address; it is negative if the access begins below the range.
    """

    instruction: int
    first: int = 0
    length: int = 0
    absolute: bool = False


@dataclass(frozen=True)
class Code:
    """A sequence of instructions. ``labels`` maps a name to the index of an instruction."""

    instructions: tuple[Instruction, ...] = ()
    labels: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Procedure:
    """Code with a name that every handler of the program may call."""

    name: str
    code: Code
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class ProbeDefinition:
    """
    Header of probepoints with its handler.

    ``maxhits`` 0 means no limit. ``logonfault`` and ``heap`` (bytes) are None if the file header decides. ``opcode`` is
    the expected first byte of the probed instruction, or None if any is accepted. ``access`` is a condition on the
    memory that the instruction accesses; no source text contains it. ``spans`` maps a keyword to the span of its
    statement.

    With ``patch``, ``OBJECT:SYMBOL``, the definition has no handler: this function of a shared object replaces the
    function at the location, until the end of the run unless it ``persists``. ``idle`` is the number of seconds to wait
    until no thread has a frame in the function; None means that it is replaced at once. With ``is_replacing``, the
    object calls the original of a function that is already patched.
    """

    location: Location
    handler: Code
    opcode: int | None = None
    minor: int = 0
    watchpoint: Access | None = None
    group: str | None = None
    types: tuple[str, ...] = ()
    passcount: int = 0
    maxhits: int = 0
    logonfault: bool | None = None
    exception_mask: int = DEFAULT_EXCEPTION_MASK
    heap: int | None = None
    at_return: bool = False
    patch: str | None = None
    persists: bool = False
    idle: int | None = None
    is_replacing: bool = False
    access: AccessCheck | None = None
    spans: Mapping[str, Span] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_in_code(self) -> bool:
        """
        True if a hit is the execution of an instruction that has a breakpoint.

        Hits of samplers, watchpoints on memory and tracepoints are not.
        """
        return (self.watchpoint is None or self.watches_ports) and not isinstance(self.location, Sampler | Tracepoint)

    @property
    def watches_ports(self) -> bool:
        """True for a watchpoint on I/O ports, which has a breakpoint at each port instruction of the module."""
        return self.watchpoint is not None and self.watchpoint.is_of_ports

    @property
    def has_many_places(self) -> bool:
        """True if the definition may have several places, each a separate probepoint."""
        return isinstance(self.location, Glob | Usdt) or self.watches_ports

    def span(self, keyword: str) -> Span | None:
        """
        Return the span of a header statement, else of the first statement of the definition.

        Return None for a definition without a source.
        """
        return self.spans.get(keyword) or next(iter(self.spans.values()), None)


@dataclass(frozen=True)
class Program:
    """
    Whole probe program file.

    ``word_size`` is the word size in bytes of the processors for which the program is, or None if it is for both sizes.
    ``jmpmax`` counts jumps; ``logmax``, ``ex_logmax`` and ``heapmax`` count bytes. ``spans`` maps a keyword to the
    place of its statement in the file header.
    """

    name: str
    modtype: ModuleType = ModuleType.USER
    word_size: int | None = None
    major: int = 0
    id: int = 0
    vars: int = 0
    gvars: int = 0
    cvars: int = 0
    tvars: int = 0
    tables: tuple[Table, ...] = ()
    jmpmax: int = JMPMAX
    logmax: int = LOGMAX
    ex_logmax: int = EX_LOGMAX
    heapmax: int = HEAPMAX
    autostacktrace: bool = False
    logonfault: bool = False
    groups: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    definitions: tuple[ProbeDefinition, ...] = ()
    procedures: tuple[Procedure, ...] = ()
    spans: Mapping[str, Span] = field(default_factory=dict, compare=False, repr=False)

    def bodies(self) -> Iterator[Code]:
        """Iterate over all code in the order of the encoding: the handlers, then the procedures."""
        for definition in self.definitions:
            yield definition.handler
        for procedure in self.procedures:
            yield procedure.code

    @cached_property
    def syntaxes(self) -> frozenset[str]:
        """The syntaxes of all instructions of the program, as in the table of instructions."""
        return frozenset([i.row.syntax for code in self.bodies() for i in code.instructions])

    @cached_property
    def has_patches(self) -> bool:
        """True if a function is replaced (``patch =``)."""
        return any(definition.patch is not None for definition in self.definitions)

    def keeps_log_on_fault(self, definition: ProbeDefinition) -> bool:
        """Return whether a hit of a definition is recorded although the probed instruction faults (``logonfault``)."""
        return self.logonfault if definition.logonfault is None else definition.logonfault

    def heap_size(self, definition: ProbeDefinition) -> int:
        """Return the size in bytes of the heap for one hit."""
        return self.heapmax if definition.heap is None else definition.heap


def split_patch(text: str) -> tuple[str, str] | None:
    """Return the object and the symbol of a patch, ``OBJECT:SYMBOL``, or None if the text has another form."""
    path, colon, symbol = text.rpartition(":")
    return (path, symbol) if path and colon and symbol and "=" not in symbol else None


def quoted(text: str) -> str:
    """Return a string in double quotes, with the escapes of RPN source."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def calls_extensions(program: Program) -> bool:
    """Return whether an instruction of the program calls an extension."""
    return any(i.row.operator == "callk" for code in program.bodies() for i in code.instructions)


def joined_program(programs: Sequence[Program]) -> Program:
    """Return the first program with the definitions of all programs added, for probepoints in several modules."""
    first, *others = programs
    if not others:
        return first
    return replace(first, definitions=tuple(each for program in programs for each in program.definitions))


# With both, a definition must be in one of the groups and have one of the types (man page, "--group", "--type").


def select(program: Program, groups: Iterable[str] = (), types: Iterable[str] = ()) -> Program:
    """
    Return the program with only the definitions in one of ``groups`` and with one of ``types``.

    An empty argument selects all. Names are case-insensitive. Raise ``SourceError`` for an unknown name, and if no
    definition remains.
    """
    return select_all((program,), groups, types)[0]


def select_all(
    programs: Sequence[Program], groups: Iterable[str] = (), types: Iterable[str] = ()
) -> tuple[Program, ...]:
    """
    Return companions with only the definitions that ``select`` would keep.

    The programs come from one source, so all declare the same names. Some may be left without definitions; raise
    ``SourceError`` if all are.
    """
    wanted_groups = tuple(dict.fromkeys(name.lower() for name in groups))
    wanted_types = tuple(dict.fromkeys(name.lower() for name in types))
    if not wanted_groups and not wanted_types:
        return tuple(programs)
    program = programs[0]  # all programs declare the same names
    diagnostics = Diagnostics()
    for keyword, definer, wanted, known in (
        ("group", "groupdef", wanted_groups, program.groups),
        ("type", "typedef", wanted_types, program.types),
    ):
        _check_names(program, keyword, definer, wanted, known, diagnostics)
    diagnostics.raise_if_errors()
    chosen = tuple(_chosen(each, wanted_groups, wanted_types) for each in programs)
    if not any(each.definitions for each in chosen):
        names = [f"group {_listed(wanted_groups)}"] if wanted_groups else []
        names += [f"type {_listed(wanted_types)}"] if wanted_types else []
        diagnostics.error(program.spans.get("name"), f"no probe definition has {' and '.join(names)}")
        diagnostics.raise_if_errors()
    return chosen


def _chosen(program: Program, groups: Sequence[str], types: Sequence[str]) -> Program:
    definitions = tuple(
        definition
        for definition in program.definitions
        if (not groups or definition.group in groups) and (not types or not set(types).isdisjoint(definition.types))
    )
    return replace(program, definitions=definitions)


def _check_names(
    program: Program,
    keyword: str,
    definer: str,
    wanted: Sequence[str],
    known: Sequence[str],
    diagnostics: Diagnostics,
) -> None:
    for name in wanted:
        if name not in known:
            hint = did_you_mean(name, known)
            if hint is None:
                hint = f"there are: {', '.join(known)}" if known else f"the program has no '{definer} ='"
            span = program.spans.get(definer) or program.spans.get("name")
            diagnostics.error(span, f"the program has no {keyword} '{name}'", hint=hint)


def _listed(names: Sequence[str]) -> str:
    return " or ".join(f"'{name}'" for name in names)


def without_opcodes(program: Program) -> Program:
    """
    Return the program without ``opcode =``, except in definitions with a pattern.

    There the opcode chooses among the matches.
    """
    return replace(
        program,
        definitions=tuple(
            definition if definition.has_many_places else replace(definition, opcode=None)
            for definition in program.definitions
        ),
    )


class Point(NamedTuple):
    """
    Properties of a probepoint that an RPN machine needs.

    ``offset`` is the byte offset in the module's file. ``jmpmax`` counts jumps; ``logmax``, ``ex_logmax`` and ``heap``
    count bytes.
    """

    module: str = ""
    offset: int = 0
    program_id: int = 0
    major: int = 0
    minor: int = 0
    jmpmax: int = JMPMAX
    logmax: int = LOGMAX
    ex_logmax: int = EX_LOGMAX
    heap: int = HEAPMAX
    exception_mask: int = DEFAULT_EXCEPTION_MASK
    autostacktrace: bool = False
    arguments: tuple[Argument, ...] = ()
    """The places of the arguments of a USDT probe."""

    @classmethod
    def of(
        cls, program: Program, definition: ProbeDefinition, offset: int, arguments: tuple[Argument, ...] = ()
    ) -> Point:
        """Return the point of a definition that was resolved to ``offset`` in the module."""
        return cls(
            module=program.name,
            offset=offset,
            program_id=program.id,
            major=program.major,
            minor=definition.minor,
            jmpmax=program.jmpmax,
            logmax=program.logmax,
            ex_logmax=program.ex_logmax,
            heap=program.heap_size(definition),
            exception_mask=definition.exception_mask,
            autostacktrace=program.autostacktrace,
            arguments=arguments,
        )
