"""
The breakpoints and returns of a program: the places of its definitions in a module's file, and the code there.

Resolution uses only the file. An error becomes a diagnostic at the program's statement. A match of a pattern that
cannot have a probepoint is left out, with the reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dprobes.diagnostics import Note, first_of
from dprobes.errors import TargetError
from dprobes.resolve.probepoints import (
    NEVER_RETURNS,
    NO_EXITS,
    TAKEN,
    LeftOutProbe,
    ProbedCode,
    ProbeKind,
    Probepoint,
    ProbeState,
    check_skip,
    opcode_state,
    probepoint_in_code,
)
from dprobes.rpn.instruction_set import OperandKind
from dprobes.rpn.program_needs import entry_instructions, executed_instructions
from dprobes.rpn.rpn_program import Address, Expression, Glob, Offset, Usdt
from dprobes.target.code.function_exits import CallFrames, Exits, function_exits
from dprobes.target.code.machine_code import (
    DecodedInstruction,
    decode_at,
    first_instructions,
    instruction_at,
    unprobeable,
)
from dprobes.target.go_binary import Convention, convention_of
from dprobes.target.module_symbols import clones_in
from dprobes.target.probed_module import NOT_EXPECTED
from dprobes.target.usdt import guarded_site

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from dprobes.diagnostics import Diagnostics
    from dprobes.resolve.probepoints import ResolvedModule
    from dprobes.rpn.rpn_program import Instruction, ProbeDefinition, Program
    from dprobes.source_text import Span
    from dprobes.target.matching_functions import Function
    from dprobes.target.probed_module import Module

__all__ = ["GoConventions", "inlined_places", "movable_probes", "resolve_breakpoints", "told_of_inlining"]


def movable_probes(resolved: ResolvedModule) -> list[Probepoint]:
    """Return the probepoints whose breakpoints may move to a neighbouring instruction if that is faster."""
    breakpoints = resolved.of(ProbeKind.BREAKPOINT)
    return [probe for probe in breakpoints if probe.state is ProbeState.COMPILED and _is_named(probe)]


def _is_named(probe: Probepoint) -> bool:
    """Return whether the probe program names the place by a function alone, without a distance or a number."""
    match probe.definition.location:
        case Glob() | Offset(Expression(0, str())):
            return True
    return False


_ARGUMENT = re.compile(r"arg\d+")

_STACK_HINT = "push what is on the stack: 'push r, sp', 'push 8', 'add', 'push mem, u64' is the first word there"


class GoConventions:
    """
    The calling conventions of the functions that a probe program probes; ``is_go`` is true for a Go module.

    In Go functions ``arg0`` and so on are the registers of Go's ABIInternal, in C functions those of the C ABI. ABI0
    passes no arguments in registers: a handler that uses one is refused, or a pattern's match left out.
    """

    def __init__(self, program: Program, *, is_go: bool) -> None:
        self._program = program
        self._is_go = is_go

    @property
    def moves_stacks(self) -> bool:
        """True if a function may be on another stack at its return than at its entry."""
        return self._is_go

    def reason_against(self, definition: ProbeDefinition, function: str) -> str | None:
        """Return the reason why a match of a pattern cannot have a handler that uses arguments; None if it can."""
        if not self._is_go or not self._asked(definition):
            return None
        match convention_of(function):
            case Convention.GO:
                return None
            case Convention.ABI0:
                return "it has its arguments on the stack (Go's ABI0)"
            case Convention.C:
                return "it is a function of C, and the pattern's other arguments are in Go's registers"

    def definitions_of_c(
        self, module: Module, probes: Iterable[Probepoint], diagnostics: Diagnostics
    ) -> frozenset[int]:
        """
        Return the numbers of the definitions whose handlers use C's arguments.

        Add errors for functions with Go's ABI0 whose handlers use arguments.
        """
        found: set[int] = set()
        for probe in probes if self._is_go else ():
            definition = probe.definition
            if definition.has_many_places:
                continue
            symbol = module.symbol_at(probe.offset)
            asked = self._asked(definition)
            match convention_of(symbol[0] if symbol is not None else None):
                case Convention.C:
                    found.add(probe.number)
                    self._refuse_procedures(definition, asked, probe.where, diagnostics)
                case Convention.ABI0:
                    for instruction in asked[:1]:
                        diagnostics.error(
                            instruction.operand_place,
                            f"'{probe.where}' takes its arguments on the stack (Go's ABI0), not in registers",
                            hint=_STACK_HINT,
                        )
                case Convention.GO:
                    pass
        return frozenset(found)

    def _asked(self, definition: ProbeDefinition) -> list[Instruction]:
        """Return the executed instructions of a handler with an argument as their operand."""
        return [
            each
            for each in executed_instructions(self._program, definition)
            if each.row.operand_kind is OperandKind.REGISTER and _ARGUMENT.fullmatch(str(each.operand))
        ]

    def _refuse_procedures(
        self, definition: ProbeDefinition, asked: list[Instruction], where: str, diagnostics: Diagnostics
    ) -> None:
        for instruction in asked:
            if not any(instruction is own for own in definition.handler.instructions):
                diagnostics.error(
                    instruction.operand_place,
                    f"'{instruction.operand}' in a procedure is an argument of Go, and '{where}' is a function of C",
                    hint="push the argument in the handler, and let the procedure take it from the stack",
                )
                return


_LISTED = 4


def told_of_inlining(module: Module, name: str, error: TargetError) -> TargetError:
    """
    Return the error for a missing symbol with the places where the function was inlined, from debug information.

    Return ``error`` itself if there are none.
    """
    if module.symbols.lookup(name) or module.symbols.imports(name):
        return error
    try:
        places = inlined_places(module, name)
    except TargetError:
        return error  # the debug information is damaged
    if not places:
        return error
    clones = clones_in(module.symbols, name)
    made = f"; the compiler has also made {first_of([repr(each) for each in clones], _LISTED)} of it" if clones else ""
    return TargetError(
        f"'{name}' is not a symbol of '{module.path}': its calls were inlined, at {first_of(places, _LISTED)}{made}",
        hint=f"write 'offset = {places[0]}', or in DProbes C 'inline {_written(module.path)}:{name}' for all of them",
    )


def inlined_places(module: Module, name: str) -> list[str]:
    """
    Return the places of a function's inlined calls, ``FUNCTION+0x4``, in order of addresses.

    Raise ``TargetError`` if the debug information is damaged.
    """
    from dprobes.dwarf.debug_file import debug_file_of
    from dprobes.dwarf.entry_search import inlined_calls_of

    debug = debug_file_of(module.elf)
    if debug is None:
        return []
    addresses = {call.first_address for call in inlined_calls_of(debug, name)}
    found = []
    for address in sorted(each for each in addresses if each is not None):
        symbol = module.symbol_at(module.file_offset(address))
        if symbol is not None:
            function, distance = symbol
            found.append(f"{function}+{distance:#x}" if distance else function)
    return found


def _written(path: Path) -> str:
    """Return a source file's path in the syntax of a probepoint in DProbes C."""
    return str(path) if re.fullmatch(r"[\w./+-]+", str(path)) else f'"{path}"'


_Places = dict[tuple[int, bool], Probepoint]
"""The probepoints found so far; the key is the file offset and ``at_return``."""

_MOVES = "Go moves the stacks of goroutines while their functions run"

_GOES_BACK = "it jumps to its first instruction, which is then executed without a call"


def resolve_breakpoints(
    program: Program, module: Module, diagnostics: Diagnostics, conventions: GoConventions
) -> tuple[list[Probepoint], list[LeftOutProbe]]:
    """Return the breakpoints and returns of a program, and the matches of patterns that are left out."""
    frames = CallFrames(module.elf)
    places: _Places = {}
    for number, definition in enumerate(program.definitions):
        if definition.watchpoint is not None or definition.has_many_places:
            continue
        asks_for_entry = bool(entry_instructions(program, definition))
        if asks_for_entry and conventions.moves_stacks:
            diagnostics.error(definition.span("return"), f"the entries of calls cannot be distinguished: {_MOVES}")
            continue
        resolver = _Resolver(program, number, definition, module, frames, diagnostics, asks_for_entry)
        if (probe := resolver.probepoint()) is not None:
            _check_unique(probe, places, diagnostics)
            places.setdefault((probe.offset, probe.at_return), probe)
    # Written places come first; patterns get the remaining ones.
    left_out: list[LeftOutProbe] = []
    for is_pattern in (False, True):
        for number, definition in enumerate(program.definitions):
            if isinstance(definition.location, Usdt) and definition.location.is_pattern is is_pattern:
                from dprobes.resolve.usdt_probes import resolve_usdt

                taken = {offset for offset, at_return in places if not at_return}
                found_sites, others = resolve_usdt(program, number, module, taken, diagnostics)
                places |= {(probe.offset, False): probe for probe in found_sites}
                left_out += others
    for number, definition in enumerate(program.definitions):
        if isinstance(definition.location, Glob):
            asks_for_entry = bool(entry_instructions(program, definition))
            pattern = definition.location.pattern
            found = _Matches(number, definition, pattern, module, frames, conventions, asks_for_entry)
            found.add_to(places, left_out)
            found.check(diagnostics)
    return sorted(places.values(), key=lambda probe: probe.number), left_out


def _check_unique(probe: Probepoint, earlier: _Places, diagnostics: Diagnostics) -> None:
    other = earlier.get((probe.offset, probe.at_return))
    if other is not None:
        what = "for the return of the function at" if probe.at_return else "at"
        diagnostics.error(
            probe.definition.span("offset"),
            f"two probe definitions {what} offset {probe.offset:#x}",
            notes=(Note("the first one is here", other.definition.span("offset")),),
        )


def _exits_difference(module: Module, exits: Exits) -> str:
    """Return, for messages, how a function's exit differs from the code in the compiled program; "" if none does."""
    for leaving in exits.exits:
        if (difference := module.difference_at(leaving.offset)) is not None:
            return f"at offset {leaving.offset:#x}, where it is left: {difference}"
    return ""


def _warn_of_mismatch(diagnostics: Diagnostics, span: Span | None, difference: str) -> None:
    diagnostics.warning(
        span,
        ProbeState.MISMATCH.line(difference),
        hint="build the program for this version of the module, or give --dont-verify-opcodes",
    )


@dataclass(slots=True)
class _Matches:
    """A look-up of the probepoints of one definition whose place is a pattern of function names."""

    number: int
    definition: ProbeDefinition
    pattern: str
    module: Module
    frames: CallFrames
    conventions: GoConventions
    asks_for_entry: bool
    taken: int = 0
    names: list[str] = field(default_factory=list)
    mismatches: list[tuple[str, str]] = field(default_factory=list)

    def add_to(self, places: _Places, left_out: list[LeftOutProbe]) -> None:
        """Add a probepoint for each matching function, and the other matches to ``left_out``."""
        from dprobes.target.matching_functions import matching_functions

        functions, others = matching_functions(self.module, self.pattern)
        refused = [(other.name, other.reason) for other in others]
        decoded = first_instructions(self.module, (function.offset for function in functions))
        for function, instruction in zip(functions, decoded, strict=True):
            key = (function.offset, self.definition.at_return)
            difference = self.module.difference_at(function.offset) or ""
            is_other = bool(difference) and difference != NOT_EXPECTED
            reason = TAKEN if key in places else None if is_other else self._reason_against(instruction, function.name)
            exits = NO_EXITS
            if reason is None and not is_other and self.definition.at_return:
                exits, reason = self._exits(function)
                difference = difference or _exits_difference(self.module, exits)
            if reason is not None:
                refused.append((function.name, reason))
                self.taken += reason is TAKEN
                continue
            self.taken += 1
            code, state = ProbedCode(instruction, exits), ProbeState.MISMATCH if difference else ProbeState.COMPILED
            name = function.name
            places[key] = probepoint_in_code(
                self.number, self.definition, str(self.module.path), name, code, state, name, difference
            )
            self.mismatches += [(function.name, difference)] if difference else []
        left_out += [LeftOutProbe(self.number, str(self.module.path), name, reason) for name, reason in refused]
        self.names = [name for name, _ in refused]

    def check(self, diagnostics: Diagnostics) -> None:
        """Add an error if no match of the pattern has a probepoint, and a warning if one has unexpected code."""
        if self.mismatches:
            name, difference = self.mismatches[0]
            more = f"; and {len(self.mismatches) - 1} more" if len(self.mismatches) > 1 else ""
            _warn_of_mismatch(diagnostics, self.definition.span("offset"), f"{name}: {difference}{more}")
        if self.taken:
            return
        quoted, span = f"'{self.pattern}'", self.definition.span("offset")
        if self.names:
            what = f"{self.names[0]} and {len(self.names) - 1} more" if len(self.names) > 1 else self.names[0]
            message = f"{quoted} matches no function of '{self.module.path}' that can carry a probe, only {what}"
            diagnostics.error(span, message)
            return
        hint = None
        if not self.module.symbols.complete:
            hint = "the file is stripped: give its symbols with --sym FILE, or install its debug file"
        elif "[" in self.pattern:
            hint = "brackets make a pattern: write a name that has them itself in quotes, as 'dprobes list' has it"
        diagnostics.error(span, f"{quoted} matches no function of '{self.module.path}'", hint=hint)

    def _exits(self, function: Function) -> tuple[Exits, str | None]:
        """Return the exits of a function, and the reason why it cannot have a probepoint, or None."""
        try:
            exits = function_exits(self.module, self.frames, function.address, function.size)
        except TargetError as error:
            return NO_EXITS, error.message
        if exits.goes_back and self.asks_for_entry:
            return exits, _GOES_BACK
        return exits, NEVER_RETURNS if exits.are_missing else None

    def _reason_against(self, instruction: DecodedInstruction, name: str) -> str | None:
        if not self.definition.at_return and (reason := unprobeable(instruction)) is not None:
            return f"its first instruction is '{instruction.text}': {reason}"
        expected = self.definition.opcode
        if expected is not None and expected != instruction.opcode_byte:
            return f"its opcode is not {expected:#04x}"
        if self.asks_for_entry and self.conventions.moves_stacks:
            return _MOVES
        return self.conventions.reason_against(self.definition, name)


@dataclass(slots=True)
class _Resolver:
    """A look-up of the probepoint of one definition whose place is a symbol or an offset, not a pattern."""

    program: Program
    number: int
    definition: ProbeDefinition
    module: Module
    frames: CallFrames
    diagnostics: Diagnostics
    asks_for_entry: bool

    @property
    def _span(self) -> Span | None:
        return self.definition.span("offset") or self.definition.span("address")

    def probepoint(self) -> Probepoint | None:
        offset = self._offset()
        if offset is None:
            return None
        if (other := self.module.difference_at(offset)) is not None:
            return self._mismatch(offset, other)
        decoded = self._instruction(offset)
        if decoded is None:
            return None
        where, state = self._where(offset), opcode_state(self.definition, decoded, self.diagnostics)
        if not self.definition.at_return:
            start = self.module.function_start(decoded.offset)
            check_skip(self.program, self.definition, where, self.diagnostics, begins=start == decoded.address)
            self._note_semaphore(offset)
            return self._made(ProbedCode(decoded), where, state)
        exits = self._exits(decoded, where)
        if exits is None:
            return None
        if difference := _exits_difference(self.module, exits):
            _warn_of_mismatch(self.diagnostics, self._span, f"{where}: {difference}")
            state = ProbeState.MISMATCH
        return self._made(ProbedCode(decoded, exits), where, state, difference)

    def _made(self, code: ProbedCode, where: str, state: ProbeState, detail: str = "") -> Probepoint:
        path = str(self.module.path)
        return probepoint_in_code(self.number, self.definition, path, where, code, state, detail=detail)

    def _mismatch(self, offset: int, difference: str) -> Probepoint | None:
        """
        Return the probepoint at a place with unexpected code; nothing else is checked there.

        Return None, and add an error, if the place has no instruction.
        """
        try:
            decoded = decode_at(self.module, offset)
        except TargetError as error:
            self.diagnostics.error(self._span, error.message, hint=error.hint)
            return None
        where = self._where(offset)
        _warn_of_mismatch(self.diagnostics, self._span, f"{where}: {difference}")
        return self._made(ProbedCode(decoded), where, ProbeState.MISMATCH, difference)

    def _exits(self, decoded: DecodedInstruction, where: str) -> Exits | None:
        span = self.definition.span("return")
        start = self.module.function_start(decoded.offset)
        if start != decoded.address:
            hint = f"the function starts at offset {self.module.file_offset(start):#x}" if start is not None else None
            self.diagnostics.error(
                span, f"'return = yes' needs the start of a function, which {where} is not", hint=hint
            )
            return None
        symbol = self.module.symbols.covering(decoded.address)
        try:
            exits = function_exits(self.module, self.frames, start, symbol.size if symbol is not None else 0)
        except TargetError as error:
            self.diagnostics.error(span, f"the returns of '{where}' cannot be found: {error.message}")
            return None
        if exits.are_missing:
            self.diagnostics.warning(span, f"'{where}' never returns")
        if exits.goes_back and self.asks_for_entry:
            self.diagnostics.error(span, f"the entries of '{where}' cannot be distinguished: {_GOES_BACK}")
            return None
        return exits

    def _where(self, offset: int) -> str:
        symbol = self.module.symbol_at(offset)
        if symbol is None:
            return f"{offset:#x}"
        name, distance = symbol
        written = self._symbol()
        if written is not None and written != name and written in self.module.names_at(offset - distance):
            name = written  # the name that the user wrote, of several names of the function
        return f"{name}+{distance:#x}" if distance else name

    def _symbol(self) -> str | None:
        """Return the symbol in the place as it is written; None if the place has none."""
        match self.definition.location:
            case Offset(Expression(_, symbol)) | Address(Expression(_, symbol)):
                return symbol
        return None

    def _offset(self) -> int | None:
        match self.definition.location:
            case Offset(Expression(addend, None)):
                return addend
            case Offset(Expression(addend, str(symbol))) | Address(Expression(addend, str(symbol))):
                try:
                    return self.module.code_offset_of(symbol, addend)
                except TargetError as error:
                    told = told_of_inlining(self.module, symbol, error)
                    self.diagnostics.error(self._span, told.message, hint=told.hint)
        return None

    def _instruction(self, offset: int) -> DecodedInstruction | None:
        try:
            decoded, certain = instruction_at(self.module, offset)
        except TargetError as error:
            self.diagnostics.error(self._span, error.message, hint=error.hint)
            return None
        if not certain and not self._is_vouched_for(decoded):
            return None
        if not self.definition.at_return and (reason := unprobeable(decoded)) is not None:
            self.diagnostics.error(self._span, f"'{decoded.text}' can never carry a probe: {reason}")
            return None
        return decoded

    def _is_vouched_for(self, decoded: DecodedInstruction) -> bool:
        """
        Return whether the program's ``opcode =`` confirms that there is code at a place where no function is known.

        Add a warning if it does, else an error.
        """
        what = f"no function is known at offset {decoded.offset:#x}"
        if self.definition.opcode is None:
            self.diagnostics.error(
                self._span,
                f"{what} of '{self.module.path}': it may be data, which a breakpoint would change",
                hint="look at it with 'dprobes locate'; if an instruction starts there, confirm it by its first byte: "
                f"opcode = {decoded.opcode_byte:#04x}",
            )
            return False
        self.diagnostics.warning(self._span, f"{what}: only 'opcode' confirms that an instruction starts there")
        return True

    def _note_semaphore(self, offset: int) -> None:
        """Add a note if the program skips the place while its USDT probe has no users."""
        if (site := guarded_site(self.module.elf, offset)) is not None:
            self.diagnostics.note(
                self._span,
                f"the place is guarded by the semaphore of 'usdt:{site.probe}': the program may skip it, without a hit",
                hint=f"'offset = usdt:{site.probe}' raises the semaphore while the probe is inserted",
            )
