"""
A program against a module's file: where each probe definition is, and what stands there.

Works on files only. What is wrong becomes a diagnostic at the statement of the program that says so; what a pattern
matches and is no place for a probepoint is left out, with the reason.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.arch import ARCHITECTURE_NAMES, Architecture, architecture
from dprobes.diagnostics import Note, Severity
from dprobes.errors import TargetError
from dprobes.lazydataclass import dataclass
from dprobes.resolve.mismatch import exits_difference, warn_of_mismatch
from dprobes.resolve.probestate import ProbeState
from dprobes.resolve.samplers import ResolvedSampler, resolve_samplers
from dprobes.resolve.watchpoints import ResolvedWatchpoint, resolve_watchpoints
from dprobes.rpn.checker import check
from dprobes.rpn.encoder import CodeImage, encode
from dprobes.rpn.operands import like_statement
from dprobes.rpn.program import Address, Expression, Glob, Offset, calls_extensions
from dprobes.target.callframes import CallFrames
from dprobes.target.codeplace import instruction_at
from dprobes.target.functionexits import Exits, function_exits
from dprobes.target.functions import matching_functions
from dprobes.target.instructions import DecodedInstruction, decode_at, first_instructions, unprobeable
from dprobes.target.location import NOT_EXPECTED

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostic, Diagnostics
    from dprobes.rpn.program import ProbeDefinition, Program
    from dprobes.target.elf import ElfFile
    from dprobes.target.location import Module

__all__ = ["LeftOutProbe", "Probepoint", "ResolvedModule", "ResolvedProbe", "architecture_of", "resolve"]


@dataclass(frozen=True, slots=True)
class ResolvedProbe:
    """
    Name one place of a probe definition in a file: a probepoint.

    ``number`` is that of the definition. ``path`` is the file's, ``where`` the place in it for people: a function and
    an offset in it, if a symbol is known. ``state`` is COMPILED, or says why the probepoint will not be inserted.
    ``function`` is the name of the function where a pattern or 'return = yes' was written, else empty. ``exits`` says
    how that is left, for a probe at its return; the instruction is the function's first one then. ``moved`` is by
    how many bytes an engine has placed the breakpoint further. ``detail`` says what does not match in a MISMATCH.
    """

    number: int
    definition: ProbeDefinition
    path: str
    offset: int
    instruction: DecodedInstruction
    where: str
    state: ProbeState = ProbeState.COMPILED
    function: str = ""
    exits: Exits | None = None
    moved: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LeftOutProbe:
    """Say why something in a file that matches the pattern of a definition has no probepoint."""

    number: int
    path: str
    name: str
    reason: str


Probepoint = ResolvedProbe | ResolvedWatchpoint | ResolvedSampler
"""What a probe definition becomes in a file."""


@dataclass(frozen=True, slots=True)
class ResolvedModule:
    """Bundle a module with the program's code for its processor and the places of its probes."""

    module: Module
    architecture: Architecture
    image: CodeImage
    probes: tuple[ResolvedProbe, ...]
    symbols: tuple[tuple[str, int], ...]
    """Link addresses of the symbols that handlers push."""
    left_out: tuple[LeftOutProbe, ...] = ()
    watchpoints: tuple[ResolvedWatchpoint, ...] = ()
    samplers: tuple[ResolvedSampler, ...] = ()
    warnings: tuple[Diagnostic, ...] = ()
    """What was warned of that is due to the file and not to the program alone."""


def architecture_of(elf: ElfFile) -> Architecture:
    """Return the architecture of a module's file; raise ``TargetError`` if we know nothing of it."""
    machine = elf.machine
    if machine not in ARCHITECTURE_NAMES:
        raise TargetError(
            f"'{elf.path}' is for the processor '{machine}'", hint="known are " + ", ".join(ARCHITECTURE_NAMES)
        )
    return architecture(machine)


def resolve(program: Program, module: Module, diagnostics: Diagnostics, *, allow_write: bool = False) -> ResolvedModule:
    """Check a program for a module's processor and find its places; raise ``SourceError`` if something is wrong."""
    arch = architecture_of(module.elf)
    check(program, arch, diagnostics, allow_write=allow_write)
    if calls_extensions(program):
        from dprobes.extensions.registry import check_extensions

        check_extensions(program, diagnostics, allow_write=allow_write)
    checked = len(diagnostics)
    frames = CallFrames(module.elf)
    places: _Places = {}
    for number, definition in enumerate(program.definitions):
        if definition.watchpoint is not None:
            continue
        resolver = _Resolver(module, arch, definition, diagnostics, frames)
        if (probe := resolver.probe(number)) is not None:
            _check_unique(probe, places, diagnostics)
            places.setdefault((probe.offset, definition.at_return), probe)
    # What is written out has its place; a pattern gets what is left.
    left_out: list[LeftOutProbe] = []
    for number, definition in enumerate(program.definitions):
        if isinstance(definition.location, Glob):
            found = _Matches(number, definition, definition.location.pattern, module, frames)
            found.add_to(places, left_out)
            found.check(diagnostics)
    watchpoints = resolve_watchpoints(program, module, diagnostics)
    symbols = _pushed_symbols(program, module, diagnostics)
    diagnostics.raise_if_errors()
    probes = sorted(places.values(), key=lambda probe: probe.number)
    warnings = tuple(d for d in diagnostics.since(checked) if d.severity is Severity.WARNING)
    image = encode(program, arch)
    samplers = resolve_samplers(program, str(module.path))
    return ResolvedModule(module, arch, image, tuple(probes), symbols, tuple(left_out), watchpoints, samplers, warnings)


_Places = dict[tuple[int, bool], ResolvedProbe]
"""The probepoints found so far by file offset, and whether it is the return from there."""


def _check_unique(probe: ResolvedProbe, earlier: _Places, diagnostics: Diagnostics) -> None:
    other = earlier.get((probe.offset, probe.definition.at_return))
    if other is not None:
        what = "at" if probe.exits is None else "for the return of the function at"
        diagnostics.error(
            probe.definition.span("offset"),
            f"two probe definitions {what} offset {probe.offset:#x}",
            notes=(Note("the first one is here", other.definition.span("offset")),),
        )


def _pushed_symbols(program: Program, module: Module, diagnostics: Diagnostics) -> tuple[tuple[str, int], ...]:
    symbols: dict[str, int] = {}
    for code in program.bodies():
        for instruction in code.instructions:
            match instruction.operand:
                case Expression(_, str(name)) if name not in symbols:
                    try:
                        symbols[name] = module.address_of(name)
                    except TargetError as error:
                        hint = error.hint or like_statement(instruction.row.operator, name)
                        diagnostics.error(instruction.operand_place, error.message, hint=hint)
    return tuple(symbols.items())


_TAKEN = "it is the place of another probe definition"


class _Matches:
    """Find the probepoints of a definition whose place is a pattern."""

    def __init__(
        self, number: int, definition: ProbeDefinition, pattern: str, module: Module, frames: CallFrames
    ) -> None:
        self._frames = frames
        self._number = number
        self._definition = definition
        self._pattern = pattern
        self._module = module
        self._path = str(module.path)
        self._taken = 0
        self._names: list[str] = []
        self._mismatches: list[tuple[str, str]] = []

    def add_to(self, places: _Places, left_out: list[LeftOutProbe]) -> None:
        """Add a probepoint for each matching function, and what else matches."""
        functions, others = matching_functions(self._module, self._pattern)
        refused = [(other.name, other.reason) for other in others]
        decoded = first_instructions(self._module, (function.offset for function in functions))
        for function, instruction in zip(functions, decoded, strict=True):
            key = (function.offset, self._definition.at_return)
            difference = self._module.difference_at(function.offset) or ""
            is_other = bool(difference) and difference != NOT_EXPECTED
            reason = _TAKEN if key in places else None if is_other else self._reason_against(instruction)
            exits = Exits((), ()) if self._definition.at_return else None
            if reason is None and not is_other and self._definition.at_return:
                try:
                    exits = function_exits(self._module, self._frames, function.address, function.size)
                    reason = None if exits.exits else "it never returns"
                    difference = difference or exits_difference(self._module, exits)
                except TargetError as error:
                    reason = error.message
            if reason is not None:
                refused.append((function.name, reason))
                self._taken += reason is _TAKEN
                continue
            self._taken += 1
            places[key] = ResolvedProbe(
                self._number,
                self._definition,
                self._path,
                function.offset,
                instruction,
                function.name,
                ProbeState.MISMATCH if difference else ProbeState.COMPILED,
                function=function.name,
                exits=exits,
                detail=difference,
            )
            self._mismatches += [(function.name, difference)] if difference else []
        left_out += [LeftOutProbe(self._number, self._path, name, reason) for name, reason in refused]
        self._names = [name for name, _ in refused]

    def check(self, diagnostics: Diagnostics) -> None:
        """Add an error if nothing that matches has a probepoint, and a warning if something has not the right code."""
        if self._mismatches:
            name, difference = self._mismatches[0]
            more = f"; and {len(self._mismatches) - 1} more" if len(self._mismatches) > 1 else ""
            warn_of_mismatch(diagnostics, self._definition.span("offset"), f"{name}: {difference}{more}")
        if self._taken:
            return
        quoted, span = f"'{self._pattern}'", self._definition.span("offset")
        if self._names:
            what = f"{self._names[0]} and {len(self._names) - 1} more" if len(self._names) > 1 else self._names[0]
            message = f"{quoted} matches no function of '{self._path}' that can carry a probe, only {what}"
            diagnostics.error(span, message)
            return
        incomplete = not self._module.symbols.complete
        hint = "the file is stripped: give its symbols with --sym FILE, or install its debug file"
        diagnostics.error(span, f"{quoted} matches no function of '{self._path}'", hint=hint if incomplete else None)

    def _reason_against(self, instruction: DecodedInstruction) -> str | None:
        if not self._definition.at_return and (reason := unprobeable(instruction)) is not None:
            return f"its first instruction is '{instruction.text}': {reason}"
        expected = self._definition.opcode
        if expected is not None and expected != instruction.opcode_byte:
            return f"its opcode is not {expected:#04x}"
        return None


class _Resolver:
    def __init__(
        self,
        module: Module,
        arch: Architecture,
        definition: ProbeDefinition,
        diagnostics: Diagnostics,
        frames: CallFrames,
    ) -> None:
        self._frames = frames
        self._module = module
        self._architecture = arch
        self._definition = definition
        self._diagnostics = diagnostics
        self._span = definition.span("offset") or definition.span("address")

    def probe(self, number: int) -> ResolvedProbe | None:
        offset = self._offset()
        if offset is None:
            return None
        if (difference := self._module.difference_at(offset)) is not None:
            return self._mismatch(number, offset, difference)
        decoded = self._instruction(offset)
        if decoded is None:
            return None
        path, where, state = str(self._module.path), self.where(offset), self._opcode_state(decoded)
        probe = ResolvedProbe(number, self._definition, path, offset, decoded, where, state)
        if not self._definition.at_return:
            return probe
        exits = self._exits(decoded, where)
        if exits is None:
            return None
        probe = replace(probe, function=where, exits=exits)
        if difference := exits_difference(self._module, exits):
            warn_of_mismatch(self._diagnostics, self._span, f"{where}: {difference}")
            return replace(probe, state=ProbeState.MISMATCH, detail=difference)
        return probe

    def _mismatch(self, number: int, offset: int, difference: str) -> ResolvedProbe | None:
        """Return the probepoint at a place where other code is than was expected; nothing else is asked there."""
        try:
            decoded = decode_at(self._module, offset)
        except TargetError as error:
            self._diagnostics.error(self._span, error.message, hint=error.hint)
            return None
        where = self.where(offset)
        warn_of_mismatch(self._diagnostics, self._span, f"{where}: {difference}")
        at_return = self._definition.at_return
        return ResolvedProbe(
            number,
            self._definition,
            str(self._module.path),
            offset,
            decoded,
            where,
            ProbeState.MISMATCH,
            where if at_return else "",
            Exits((), ()) if at_return else None,
            detail=difference,
        )

    def _exits(self, decoded: DecodedInstruction, where: str) -> Exits | None:
        span = self._definition.span("return")
        start = self._module.function_start(decoded.offset)
        if start != decoded.address:
            hint = f"the function starts at offset {self._module.file_offset(start):#x}" if start is not None else None
            self._diagnostics.error(
                span, f"'return = yes' needs the start of a function, which {where} is not", hint=hint
            )
            return None
        symbol = self._module.symbols.covering(decoded.address)
        try:
            exits = function_exits(self._module, self._frames, start, symbol.size if symbol is not None else 0)
        except TargetError as error:
            self._diagnostics.error(span, f"the returns of '{where}' cannot be found: {error.message}")
            return None
        if not exits.exits:
            self._diagnostics.warning(span, f"'{where}' never returns")
        return exits

    def where(self, offset: int) -> str:
        symbol = self._module.symbol_at(offset)
        if symbol is None:
            return f"{offset:#x}"
        name, distance = symbol
        return f"{name}+{distance:#x}" if distance else name

    def _offset(self) -> int | None:
        match self._definition.location:
            case Offset(Expression(addend, None)):
                return addend
            case Offset(Expression(addend, str(symbol))) | Address(Expression(addend, str(symbol))):
                try:
                    return self._module.code_offset_of(symbol, addend)
                except TargetError as error:
                    self._diagnostics.error(self._span, error.message, hint=error.hint)
        return None

    def _instruction(self, offset: int) -> DecodedInstruction | None:
        try:
            decoded, certain = instruction_at(self._module, offset)
        except TargetError as error:
            self._diagnostics.error(self._span, error.message, hint=error.hint)
            return None
        if not certain and not self._is_vouched_for(decoded):
            return None
        if not self._definition.at_return and (reason := unprobeable(decoded)) is not None:
            self._diagnostics.error(self._span, f"'{decoded.text}' can never carry a probe: {reason}")
            return None
        return decoded

    def _is_vouched_for(self, decoded: DecodedInstruction) -> bool:
        """Return whether 'opcode' says that there is code at a place of which nothing else is known; say so."""
        what = f"no function is known at offset {decoded.offset:#x}"
        if self._definition.opcode is None:
            self._diagnostics.error(
                self._span,
                f"{what} of '{self._module.path}': there may be data, which a breakpoint would change",
                hint="look at it with 'dprobes locate'; if an instruction starts there, say so by its first byte: "
                f"opcode = {decoded.opcode_byte:#04x}",
            )
            return False
        self._diagnostics.warning(self._span, f"{what}: only 'opcode' says that an instruction starts there")
        return True

    def _opcode_state(self, decoded: DecodedInstruction) -> ProbeState:
        expected = self._definition.opcode
        if expected is None or expected == decoded.opcode_byte:
            return ProbeState.COMPILED
        self._diagnostics.warning(
            self._definition.span("opcode"),
            f"MISMATCH: opcode {decoded.opcode_byte:#04x} ({decoded.text}) is there, not {expected:#04x}; not inserted",
            hint=f"if the place is right, write 'opcode = {decoded.opcode_byte:#04x}'",
        )
        return ProbeState.MISMATCH
