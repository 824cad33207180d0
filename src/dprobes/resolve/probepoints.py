"""
The result of resolution: probepoints, their states until removal, and a description of their module.

The space of probepoints is the files of a module, every process, the whole system, or the kernel. It selects the
functions that find the probepoints of a program: ``local_module`` has a case for each.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dprobes.errors import TargetError
from dprobes.record.record_origin import Place
from dprobes.rpn.operands import like_statement
from dprobes.rpn.program_needs import skipping_instruction, watches_user_addresses
from dprobes.rpn.rpn_program import Expression, ModuleType, Sampler
from dprobes.target.code.function_exits import Exits
from dprobes.target.elf.elf_file import ElfFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dprobes.arch import Architecture
    from dprobes.arch.usdt_arguments import Argument
    from dprobes.diagnostics import Diagnostics
    from dprobes.record.record_origin import RecordSource
    from dprobes.rpn.instruction_encoding import CodeImage
    from dprobes.rpn.rpn_program import Access, ProbeDefinition, Program
    from dprobes.source_text import Diagnostic
    from dprobes.target.code.machine_code import DecodedInstruction
    from dprobes.target.code.port_instructions import PortAccess
    from dprobes.target.kernel.traced_fields import TracedEvent
    from dprobes.target.probed_module import Module
    from dprobes.target.usdt import UsdtSite

__all__ = [
    "ANYWHERE",
    "MACHINE",
    "NEVER_RETURNS",
    "NO_EXITS",
    "TAKEN",
    "EveryProcess",
    "LeftOutProbe",
    "ProbeKind",
    "ProbeState",
    "ProbedCode",
    "Probepoint",
    "ResolvedModule",
    "Space",
    "SymbolSpace",
    "WatchedMemory",
    "check_skip",
    "impossible_address",
    "opcode_state",
    "places_of",
    "probepoint_in_code",
    "pushed_symbols",
    "space_of",
    "with_files",
]


class ProbeState(Enum):
    """A state of a probepoint; the values are the words that ``query`` prints (recovered reference 2.4)."""

    COMPILED = "COMPILED"
    ACTIVE = "ACTIVE"
    MISMATCH = "MISMATCH"
    CONFLICT = "CONFLICT"
    DISABLED = "DISABLED"
    REMOVED = "REMOVED"
    INVALID_OFFSET = "INVALID_OFFSET"
    EXCLUDED = "EXCLUDED"
    DEBUGREG_UNAVAIL = "DEBUGREG_UNAVAIL"
    WATCHPOINT_LEN_INVALID = "WATCHPOINT_LEN_INVALID"

    @property
    def is_obstacle(self) -> bool:
        """True if a probepoint in this state was never inserted."""
        return self not in (ProbeState.COMPILED, ProbeState.ACTIVE, ProbeState.DISABLED, ProbeState.REMOVED)

    def line(self, reason: str, where: str = "", outcome: str = "not inserted") -> str:
        """Return "STATE WHERE: REASON; OUTCOME", a line about a probepoint that is missing."""
        return f"{self.value}{where and ' '}{where}: {reason}; {outcome}"


def impossible_address(address: int) -> str:
    """Return the reason why a watchpoint's run-time address is an INVALID_OFFSET."""
    return f"no program can have the address {address:#x}"


class ProbeKind(Enum):
    """The cause of a probepoint's hits: an instruction, a return, an access to memory, a clock, or a tracepoint."""

    BREAKPOINT = "breakpoint"
    RETURN = "return"
    WATCHPOINT = "watchpoint"
    SAMPLER = "sampler"
    TRACEPOINT = "tracepoint"

    @property
    def is_on_each_cpu(self) -> bool:
        """True for kinds that occupy a resource on each CPU, as long as the CPU is online."""
        return self in (ProbeKind.WATCHPOINT, ProbeKind.SAMPLER)


_IN_CODE = (ProbeKind.BREAKPOINT, ProbeKind.RETURN)

NO_EXITS = Exits((), ())
"""Exits of a breakpoint, and of a function that was not recognised."""

NEVER_RETURNS = "it never returns"
"""Reason why a function has no probepoint at its return, as a clause about the function."""

TAKEN = "it is the place of another probe definition"
"""Reason why a match of a pattern has no separate probepoint."""


class ProbedCode(NamedTuple):
    """
    The code of a breakpoint or of a return.

    ``instruction`` is the one at a breakpoint, or the first one of the function that a return leaves by its ``exits``.
    ``moved`` is the distance in bytes by which an engine has moved the breakpoint forward. ``usdt`` is the site of a
    USDT probe, ``port`` the access of a port instruction that a watchpoint on I/O ports has found.
    """

    instruction: DecodedInstruction
    exits: Exits = NO_EXITS
    moved: int = 0
    usdt: UsdtSite | None = None
    port: PortAccess | None = None


class WatchedMemory(NamedTuple):
    """
    The memory of a watchpoint.

    ``address`` is a link address of the file or, if ``absolute``, an address of the process.
    """

    address: int
    length: int
    absolute: bool
    access: Access


class Probepoint(NamedTuple):
    """
    A place where the handler of a probe definition runs.

    ``number`` is that of the definition. ``path`` is the file that contains the place, or a name in place of a file
    (``Space``). ``where`` is the name of the place in it for people: a function and an offset, if a symbol is
    known. ``subject`` has the data that only probepoints of this ``kind`` have. ``state`` is COMPILED, or the reason
    why the probepoint will not be inserted; ``detail`` is the difference of a MISMATCH. ``function`` is the name of the
    function where a pattern or 'return = yes' was written, else empty.
    """

    kind: ProbeKind
    number: int
    definition: ProbeDefinition
    path: str
    where: str
    subject: ProbedCode | WatchedMemory | Sampler | TracedEvent
    state: ProbeState = ProbeState.COMPILED
    function: str = ""
    detail: str = ""

    @property
    def code(self) -> ProbedCode:
        """The code of a breakpoint or return."""
        assert isinstance(self.subject, ProbedCode)
        return self.subject

    @property
    def memory(self) -> WatchedMemory:
        """The memory of a watchpoint."""
        assert isinstance(self.subject, WatchedMemory)
        return self.subject

    @property
    def sampler(self) -> Sampler:
        """The rate or the counter of a sampler."""
        assert isinstance(self.subject, Sampler)
        return self.subject

    @property
    def traced(self) -> TracedEvent:
        """The event of a tracepoint."""
        from dprobes.target.kernel.traced_fields import TracedEvent

        assert isinstance(self.subject, TracedEvent)
        return self.subject

    @property
    def is_in_code(self) -> bool:
        """True for a breakpoint or return, for which engines put breakpoints into the code."""
        return self.kind in _IN_CODE

    @property
    def instruction(self) -> DecodedInstruction:
        """The instruction of ``code``."""
        return self.code.instruction

    @property
    def offset(self) -> int:
        """The file offset of the instruction."""
        return self.code.instruction.offset

    @property
    def placed(self) -> int:
        """The file offset of the breakpoint."""
        return self.offset + self.code.moved

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The locations of a USDT probe's arguments; empty for other probepoints."""
        site = self.code.usdt if self.is_in_code else None
        return site.arguments if site is not None else ()

    @property
    def at_return(self) -> bool:
        """True if the return from a function, or the end of a system call, hits it."""
        return self.kind is ProbeKind.RETURN or (self.kind is ProbeKind.TRACEPOINT and self.definition.at_return)

    @property
    def never_returns(self) -> bool:
        """True for the return from a function whose code has been read and contains no exit."""
        exits = self.code.exits if self.kind is ProbeKind.RETURN else NO_EXITS
        return bool(exits.ranges) and exits.are_missing

    @property
    def place(self) -> tuple[str, int, bool]:
        """File, offset and ``at_return``, unique among the probepoints in code."""
        return self.path, self.offset, self.at_return


def probepoint_in_code(
    number: int,
    definition: ProbeDefinition,
    path: str,
    where: str,
    code: ProbedCode,
    state: ProbeState = ProbeState.COMPILED,
    function: str = "",
    detail: str = "",
) -> Probepoint:
    """
    Return the breakpoint or return of a definition.

    The function of a return is ``where`` if ``function`` is empty.
    """
    kind, named = (ProbeKind.RETURN, function or where) if definition.at_return else (ProbeKind.BREAKPOINT, function)
    return Probepoint(kind, number, definition, path, where, code, state, named, detail)


def opcode_state(definition: ProbeDefinition, found: DecodedInstruction, diagnostics: Diagnostics) -> ProbeState:
    """
    Return MISMATCH, and add a warning, if ``opcode =`` differs from the first byte of the instruction ``found``.

    Otherwise return COMPILED.
    """
    expected = definition.opcode
    if expected is None or expected == found.opcode_byte:
        return ProbeState.COMPILED
    diagnostics.warning(
        definition.span("opcode"),
        ProbeState.MISMATCH.line(f"opcode {found.opcode_byte:#04x} ({found.text}) is there, not {expected:#04x}"),
        hint=f"if the place is right, write 'opcode = {found.opcode_byte:#04x}'",
    )
    return ProbeState.MISMATCH


class LeftOutProbe(NamedTuple):
    """A match of a definition's pattern that has no probepoint; ``reason`` is a clause about the function or place."""

    number: int
    path: str
    name: str
    reason: str


class ResolvedModule(NamedTuple):
    """
    A module with the program's code for its processor and the probepoints in it.

    ``probepoints`` are in the order of their definitions: first those in code, then watchpoints, then samplers.
    ``symbols`` are the link addresses of the symbols that handlers push. ``warnings`` are those that the file causes,
    not the program alone.
    """

    module: Module
    architecture: Architecture
    image: CodeImage
    probepoints: tuple[Probepoint, ...]
    symbols: tuple[tuple[str, int], ...]
    left_out: tuple[LeftOutProbe, ...] = ()
    warnings: tuple[Diagnostic, ...] = ()
    of_c: frozenset[int] = frozenset()
    """In a Go module, the numbers of the definitions that probe a C function and take its arguments from the C ABI."""

    @property
    def per_cpu(self) -> tuple[int, frozenset[int]]:
        """Address 0 and no symbols: programs have no per-CPU variables."""
        return 0, frozenset()

    def of(self, kind: ProbeKind) -> tuple[Probepoint, ...]:
        """Return the module's probepoints of a kind, in their order."""
        return tuple(probe for probe in self.probepoints if probe.kind is kind)

    @property
    def in_code(self) -> tuple[Probepoint, ...]:
        """The breakpoints and returns."""
        return tuple(probe for probe in self.probepoints if probe.kind in _IN_CODE)

    @property
    def events(self) -> tuple[Probepoint, ...]:
        """The probepoints outside of code, such as watchpoints and samplers, for which no code is changed."""
        return tuple(probe for probe in self.probepoints if probe.kind not in _IN_CODE)


def places_of(module: str, probes: Sequence[Probepoint], first: int = 0) -> list[Place]:
    """Return the places of the module's probepoints in records, from the index ``first`` in ``probes`` on."""
    known: set[tuple[str, int, bool]] = set()
    if any(probe.at_return for probe in probes):
        known = {probe.place for probe in probes if probe.is_in_code}
    return [_place_of(module, probe, known) for probe in probes[first:]]


def _place_of(module: str, probe: Probepoint, known: set[tuple[str, int, bool]]) -> Place:
    if not probe.is_in_code:
        return Place(module, probe.where, probe.function, at_return=probe.at_return, is_code=False)
    path, offset, at_return = probe.place
    placed = probe.placed if probe.code.moved else None
    return Place(module, probe.where, probe.function, placed, at_return, (path, offset, not at_return) in known)


def with_files(source: RecordSource, probes: Iterable[Probepoint]) -> RecordSource:
    """Return a copy of a record source with the files, and any build IDs, of the probepoints in code."""
    build_ids, paths = dict.fromkeys(source.build_ids), dict.fromkeys(source.paths)
    for path in dict.fromkeys(probe.path for probe in probes if probe.is_in_code):
        paths[path] = None
        with contextlib.suppress(TargetError):  # the file may be deleted already
            if (build_id := ElfFile.open(path).build_id) is not None:
                build_ids[build_id] = None
    return replace(source, build_ids=tuple(build_ids), paths=tuple(paths))


def pushed_symbols(
    program: Program, address_of: Callable[[str], int], diagnostics: Diagnostics
) -> tuple[tuple[str, int], ...]:
    """Return the addresses of the symbols that handlers push; add an error for each that has none."""
    symbols: dict[str, int] = {}
    for code in program.bodies():
        for instruction in code.instructions:
            match instruction.operand:
                case Expression(_, str(name)) if name not in symbols:
                    try:
                        symbols[name] = address_of(name)
                    except TargetError as error:
                        hint = error.hint or like_statement(instruction.row.operator, name)
                        diagnostics.error(instruction.operand_place, error.message, hint=hint)
    return tuple(symbols.items())


def check_skip(
    program: Program, definition: ProbeDefinition, where: str, diagnostics: Diagnostics, *, begins: bool
) -> None:
    """Add an error if a handler skips the function, and no function ``begins`` at the place ``where``."""
    if begins:
        return
    if (skip := skipping_instruction(program, definition)) is not None:
        diagnostics.error(
            skip.span,
            f"'skip' returns from the function that begins at the probepoint, but none begins at {where}",
            hint="only there the return address is on top of the stack: write 'offset =' with the function's name",
        )


ANYWHERE = "*"
"""Module name in programs with samplers of all code, whatever the CPU executes."""
MACHINE = "machine"
"""Module name in programs about the machine itself, for any software on it."""


class Space(Enum):
    """The spaces of a program's probepoints; the values are text for users."""

    MODULE = "the files of a module"
    PROCESSES = "every process"
    SYSTEM = "whatever runs"
    KERNEL = "the kernel and its modules"


def space_of(program: Program) -> Space:
    """Return where a program's hits can be: in a module's files, every process, the whole system, or the kernel."""
    if program.name == ANYWHERE:
        return Space.SYSTEM
    if watches_user_addresses(program) and program.name != MACHINE:
        return Space.PROCESSES
    return Space.MODULE if program.modtype is ModuleType.USER else Space.KERNEL


class SymbolSpace(Protocol):
    """A space in which symbols have addresses; a ``Module`` is one."""

    @property
    def path(self) -> Path:
        """The path of the file, or the name of the space in messages."""

    @property
    def word_size(self) -> int:
        """Size of an address in bytes."""

    def address_of(self, symbol: str) -> int:
        """Return the link address of a symbol; raise ``TargetError`` if there is none."""


class EveryProcess(NamedTuple):
    """The processes of one architecture: a space without symbols, for programs that watch addresses."""

    architecture: Architecture

    @property
    def path(self) -> Path:
        """The name of the space in messages, in the place of a file name."""
        return Path(f"{self.architecture.name} programs")

    @property
    def word_size(self) -> int:
        """Size of an address in bytes."""
        return self.architecture.word_size

    def address_of(self, symbol: str) -> int:
        """Raise ``TargetError``: without a file there are no symbols."""
        raise TargetError(f"'{symbol}' is not an address of every program")
