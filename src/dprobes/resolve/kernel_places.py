"""
The probepoints of a program in the running kernel or in one of its modules.

Places are addresses of the running kernel; offsets count from ``_text``, or from the address of a module. The code
there is read from the kernel's memory if this machine allows that, or else from the kernel's files. If neither is
readable, only the kernel checks that a breakpoint is at the start of an instruction, and ``opcode`` is not checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.arch import host_architecture
from dprobes.diagnostics import Note
from dprobes.errors import TargetError
from dprobes.resolve.codeless_probes import resolve_samplers, resolve_tracepoints, resolve_watchpoints
from dprobes.resolve.probepoints import (
    TAKEN,
    LeftOutProbe,
    ProbedCode,
    Probepoint,
    ProbeState,
    check_skip,
    opcode_state,
    probepoint_in_code,
    pushed_symbols,
)
from dprobes.rpn.instruction_encoding import encode
from dprobes.rpn.rpn_program import Address, Expression, Glob, ModuleType, Offset, Sampler, Tracepoint
from dprobes.target.code.machine_code import MAX_LENGTH, DecodedInstruction, decode
from dprobes.target.kernel.kernel_copies import matching_copies
from dprobes.target.kernel.kernel_files import module_name, running_build_id
from dprobes.target.kernel.kernel_symbols import KALLSYMS, CarriedKernel, KernelPlace, NeededKallsyms
from dprobes.target.kernel.running_kernel import KERNEL_NAMES, RunningKernel, has_same_arguments, present_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.arch import Architecture
    from dprobes.diagnostics import Diagnostics
    from dprobes.rpn.instruction_encoding import CodeImage
    from dprobes.rpn.rpn_program import ProbeDefinition, Program
    from dprobes.source_text import Diagnostic, Span
    from dprobes.target.kernel.kernel_symbols import KernelSymbol

__all__ = [
    "KERNEL_CODE",
    "KernelModule",
    "ResolvedKernel",
    "build_kernel",
    "kernel_here",
    "kernel_module_of",
    "module_named_by",
    "needs_addresses",
    "resolve_kernel",
]

_BITS = 64

KERNEL_CODE = 1 << 63, (1 << 64) - 1
"""Address range of the kernel and its modules, with the end excluded."""


@dataclass(frozen=True, slots=True)
class KernelModule:
    """The kernel, or a module of it, that a program names: a space with symbols. ``name`` is "" for the kernel."""

    kernel: RunningKernel
    name: str

    @property
    def path(self) -> Path:
        """The name of the kernel or module in messages and records, in the place of a file name."""
        return Path(self.name or KERNEL_NAMES[0])

    @property
    def word_size(self) -> int:
        """Size of an address in bytes."""
        return _BITS // 8

    @property
    def base(self) -> int:
        """The address that offsets count from."""
        return self.kernel.base_of(self.name)

    def check(self) -> None:
        """Raise ``TargetError`` if the kernel does not show the module's address."""
        self.kernel.base_of(self.name)

    @property
    def code(self) -> tuple[int, int]:
        """The address range of the module, or of the kernel and its modules, with the end excluded."""
        if not self.name:
            return KERNEL_CODE
        module = self.kernel.modules[self.name]
        return module.address, module.address + module.size

    @property
    def is_loaded(self) -> bool:
        """
        True if the kernel or module is in memory.

        Otherwise addresses are computed from its file, for an arbitrary base.
        """
        return self.kernel.is_loaded

    def address_of(self, symbol: str) -> int:
        """Return the address of a symbol; raise ``TargetError`` if there is none, or one for each CPU."""
        address = self.kernel.symbol(symbol, self.name).address
        if not self.name and self.kernel.is_per_cpu(address):
            raise TargetError(
                f"each CPU has a copy of '{symbol}' at another address",
                hint=f"'push {symbol}' gives the address of the copy of the CPU that was hit",
            )
        return address

    def pushed(self, symbol: str) -> int:
        """
        Return a symbol's address as handlers push it, for a per-CPU symbol its offset.

        Raise ``TargetError`` if the kernel or module is not loaded.
        """
        if self.is_loaded:
            return self.kernel.symbol(symbol, self.name).address
        self.address_of(symbol)
        raise TargetError(
            f"'{symbol}' has no address before the module '{self.name}' is loaded",
            hint="load the module first, or start from what a register points to",
        )


_END = "_etext"
"""Symbol after the last function of the kernel."""

_CHANGED = "the kernel replaces this instruction when it loads the module"


@dataclass(frozen=True, slots=True)
class ResolvedKernel:
    """
    The kernel or a module with the program's code and the probepoints in it; addresses are run-time ones.

    The fields have the meaning of those of ``ResolvedModule``.
    """

    module: KernelModule
    architecture: Architecture
    image: CodeImage
    probepoints: tuple[Probepoint, ...]
    symbols: tuple[tuple[str, int], ...]
    left_out: tuple[LeftOutProbe, ...] = ()
    warnings: tuple[Diagnostic, ...] = ()

    @property
    def per_cpu(self) -> tuple[int, frozenset[int]]:
        """The address of ``__per_cpu_offset``, or 0, and the addresses in ``symbols`` that are of per-CPU variables."""
        kernel = self.module.kernel
        if self.module.name:
            return 0, frozenset()
        copied = frozenset(address for _, address in self.symbols if kernel.is_per_cpu(address))
        return kernel.per_cpu_offsets if copied else 0, copied

    @property
    def in_code(self) -> tuple[Probepoint, ...]:
        """The breakpoints and returns."""
        return tuple(probe for probe in self.probepoints if probe.is_in_code)

    @property
    def events(self) -> tuple[Probepoint, ...]:
        """The watchpoints, samplers and tracepoints."""
        return tuple(probe for probe in self.probepoints if not probe.is_in_code)


def module_named_by(program: Program, called: Sequence[str] = KERNEL_NAMES) -> str:
    """
    Return the module that a program names, "" for the kernel; raise ``TargetError`` for an invalid name.

    ``called`` are the names of the kernel.
    """
    if program.modtype is ModuleType.KMOD:
        return module_name(program.name)
    if program.name.partition("-")[0] not in called:
        raise TargetError(
            f"'{program.name}' is not a name of the running kernel",
            hint=f"write 'name = {called[0]}', or 'modtype = kmod' for a module of the kernel",
        )
    return ""


def kernel_module_of(program: Program, kernel: RunningKernel) -> KernelModule:
    """Return the kernel or module that a program names; raise ``TargetError`` if it does not exist."""
    name = module_named_by(program, kernel.called)
    if name and name not in kernel.modules:
        from dprobes.target.kernel.kernel_image import open_unloaded_module

        unloaded = open_unloaded_module(program.name)
        if unloaded.name not in kernel.modules:
            return KernelModule(unloaded, unloaded.name)
        name = unloaded.name
    return KernelModule(kernel, name)


def needs_addresses(program: Program) -> bool:
    """Return whether a program needs addresses: it does for all but tracepoints, and samplers of the kernel."""
    if program.modtype is ModuleType.TRACEPOINT:
        return False
    return program.modtype is ModuleType.KMOD or not all(
        isinstance(definition.location, Sampler) for definition in program.definitions
    )


def resolve_kernel(
    program: Program,
    module: KernelModule,
    architecture: Architecture,
    diagnostics: Diagnostics,
    *,
    with_tracepoints: bool = True,
) -> ResolvedKernel:
    """
    Resolve the places of a program; add errors and warnings to ``diagnostics``.

    Tracepoints are those of the running kernel, also if ``module`` belongs to another one; without ``with_tracepoints``
    they are left out.
    """
    resolver = _Resolver(program, module, diagnostics)
    in_code = resolver.in_code()
    left_out = resolver.left_out
    if any(definition.watches_ports for definition in program.definitions):
        from dprobes.resolve.port_watchpoints import kernel_port_watchpoints

        ports, others = kernel_port_watchpoints(program, module.kernel, module.name, str(module.path), diagnostics)
        in_code = sorted((*in_code, *ports), key=lambda probe: probe.number)
        left_out += others
    watchpoints = resolve_watchpoints(program, module, diagnostics, module.kernel.watchpoints)
    samplers = resolve_samplers(program, str(module.path))
    tracepoints = resolve_tracepoints(program, str(module.path), diagnostics) if with_tracepoints else ()
    symbols = pushed_symbols(program, module.pushed, diagnostics)
    image = encode(program, architecture)
    return ResolvedKernel(
        module,
        architecture,
        image,
        (*in_code, *watchpoints, *samplers, *tracepoints),
        symbols,
        tuple(left_out),
    )


class _Resolver:
    def __init__(self, program: Program, module: KernelModule, diagnostics: Diagnostics) -> None:
        self._program = program
        self._module = module
        self._kernel = module.kernel
        self._path = str(module.path)
        self._diagnostics = diagnostics
        self._places: dict[tuple[int, bool], Probepoint] = {}
        self._has_said_unverified = False
        self.left_out: list[LeftOutProbe] = []

    def in_code(self) -> list[Probepoint]:
        """Return the breakpoints and returns: first those with written places, then the matches of patterns."""
        for number, definition in enumerate(self._program.definitions):
            if definition.watchpoint is not None or isinstance(definition.location, Tracepoint):
                continue
            try:
                probe = self._written(number, definition)
            except TargetError as error:
                span = definition.span("offset") or definition.span("address")
                self._diagnostics.error(span, error.message, hint=error.hint)
                continue
            if probe is not None:
                self._enter(probe)
        for number, definition in enumerate(self._program.definitions):
            if isinstance(definition.location, Glob):
                self._enter_matches(number, definition, definition.location.pattern)
        return sorted(self._places.values(), key=lambda probe: probe.number)

    def _enter(self, probe: Probepoint) -> None:
        other = self._places.setdefault((probe.offset, probe.at_return), probe)
        if other is not probe:
            what = "for the return of the function at" if probe.at_return else "at"
            self._diagnostics.error(
                probe.definition.span("offset") or probe.definition.span("address"),
                f"two probe definitions {what} {probe.where}",
                notes=(Note("the first one is here", other.definition.span("offset")),),
            )

    def _written(self, number: int, definition: ProbeDefinition) -> Probepoint | None:
        address = self._address(definition)
        if address is None:
            return None
        function = self._function(address)
        if function is None:
            raise TargetError(
                f"{address:#x} is not in the code of '{self._module.path}'", hint=self._linked_place(address)
            )
        where = self._kernel.name_of(address)
        if definition.at_return and address != function.address:
            raise TargetError(
                f"'return = yes' needs the start of a function, which {where} is not",
                hint=f"the function starts at offset {function.address - self._module.base:#x}",
            )
        begins = address == function.address
        check_skip(self._program, definition, where, self._diagnostics, begins=begins)
        is_there = not self._kernel.is_given_back(address)
        instruction = self._instruction(definition, function, address) if is_there else self._unknown(address)
        state = self._state(definition, instruction)
        if state is ProbeState.COMPILED and (reason := self._kernel.refusal(address)) is not None:
            state = ProbeState.EXCLUDED
            self._diagnostics.warning(
                definition.span("offset") or definition.span("address"),
                f"{state.value}: {where}: {reason}; not inserted",
            )
        return self._made(number, definition, instruction, where, state)

    def _address(self, definition: ProbeDefinition) -> int | None:
        match definition.location:
            case Offset(Expression(addend, None)):
                return self._module.base + addend
            case Address(Expression(addend, None)):
                return addend
            case Offset(Expression(addend, str(name))) | Address(Expression(addend, str(name))):
                symbol = self._kernel.symbol(name, self._module.name, is_code=True)
                if symbol.name in present_names(name):
                    self._diagnostics.note(
                        definition.span("offset") or definition.span("address"),
                        f"'{name}' is called '{symbol.name}' in this kernel"
                        + ("" if has_same_arguments(name, symbol.name) else ", with other arguments"),
                    )
                if not symbol.is_code:
                    raise TargetError(
                        f"'{name}' is data of '{self._module.path}', not code",
                        hint=f"to see accesses to it, write 'address = {name}' and 'watchpoint = w' (or rw)",
                    )
                return symbol.address + addend
        return None

    def _function(self, address: int) -> KernelSymbol | None:
        """Return the function of the module that covers an address; None if there is none."""
        symbol = self._kernel.symbols.covering(address)
        return symbol if symbol is not None and symbol.module == self._module.name else None

    def _linked_place(self, address: int) -> str | None:
        """
        Return a hint if an address is a link address of the kernel, and the kernel runs elsewhere (KASLR).

        Return None for other addresses.
        """
        shift = self._kernel.text.shift
        if not shift or self._module.name or (function := self._function(address + shift)) is None:
            return None
        if any(end.address <= address + shift for end in self._kernel.symbols.find(_END, "")):
            return None
        distance = address + shift - function.address
        place = f"{function.name} + {distance:#x}" if distance else function.name
        return f"this kernel runs {shift:#x} bytes above where it was linked for: write 'offset = {place}'"

    def _instruction(self, definition: ProbeDefinition, function: KernelSymbol, address: int) -> DecodedInstruction:
        """Return the instruction at an address; raise ``TargetError`` if none starts there."""
        offset = address - self._module.base
        text = self._kernel.text
        unknown = self._unknown(address)
        code = text.read(function.address, address - function.address + MAX_LENGTH)
        if not code:
            if (raw := self._kernel.expected.get(address)) is not None:
                return next(iter(decode(raw, _BITS, address, offset)))
            self._say_unverified(definition, text.problem_at(function.address) or "the kernel does not show its text")
            return unknown
        before = None
        for found in decode(code, _BITS, function.address, function.address - self._module.base):
            if found.address == address:
                return found
            if found.address > address:
                assert before is not None, "the function's start is before the address"
                if text.is_patched(before):
                    self._say_unverified(definition, _patched(text.origin_of(address), before))
                    return unknown
                starts = f"{self._kernel.name_of(before.address)} and {self._kernel.name_of(found.address)}"
                is_number = isinstance(definition.location, Address) and definition.location.low.symbol is None
                raise TargetError(
                    f"{self._kernel.name_of(address)} is inside an instruction",
                    hint=(self._linked_place(address) if is_number else None) or f"instructions start at {starts}",
                )
            before = found
        raise TargetError(f"no instruction is at {self._kernel.name_of(address)}")

    def _unknown(self, address: int) -> DecodedInstruction:
        """Return a placeholder for an instruction that is not read."""
        return DecodedInstruction(address, 0, b"", "?", 0, "?", address - self._module.base)

    def _say_unverified(self, definition: ProbeDefinition, problem: str) -> None:
        """
        Add a note, once per program, that instructions are not verified because of ``problem``.

        If the definition has ``opcode =``, add a warning instead.
        """
        if definition.opcode is not None:
            self._diagnostics.warning(definition.span("opcode"), f"the opcode is not verified: {problem}")
        elif not self._has_said_unverified and self._kernel.checks_places:
            self._has_said_unverified = True
            self._diagnostics.note(
                definition.span("offset") or definition.span("address"),
                f"only the kernel checks that an instruction starts there: {problem}",
            )

    def _state(self, definition: ProbeDefinition, instruction: DecodedInstruction) -> ProbeState:
        expected = definition.opcode
        if expected is None or not instruction.raw or expected == instruction.opcode_byte:
            return ProbeState.COMPILED
        if self._kernel.is_changed_later(instruction.address):
            self._diagnostics.warning(definition.span("opcode"), f"the opcode is not verified: {_CHANGED}")
            return ProbeState.COMPILED
        text = self._kernel.text
        if text.is_patched(instruction):
            self._say_unverified(
                definition, _patched(text.origin_of(instruction.address) or "the file that was built for", instruction)
            )
            return ProbeState.COMPILED
        return opcode_state(definition, instruction, self._diagnostics)

    def _made(
        self,
        number: int,
        definition: ProbeDefinition,
        instruction: DecodedInstruction,
        where: str,
        state: ProbeState,
        function: str = "",
    ) -> Probepoint:
        return probepoint_in_code(number, definition, self._path, where, ProbedCode(instruction), state, function)

    # Patterns

    def _enter_matches(self, number: int, definition: ProbeDefinition, pattern: str) -> None:
        span, path, base = definition.span("offset"), self._path, self._module.base
        taken = 0
        matches = list(matching_copies(self._kernel, pattern, self._module.name))
        for copy in matches:
            symbol, where = copy.symbol, copy.name
            place = symbol.address - base, definition.at_return
            reason = self._reason_against(symbol, place)
            if reason is not None:
                taken += reason is TAKEN
                self.left_out.append(LeftOutProbe(number, path, where, reason))
                continue
            probe = self._made(number, definition, self._unknown(symbol.address), where, ProbeState.COMPILED, where)
            self._places[place] = probe
            taken += 1
        if not matches:
            self._diagnostics.error(span, f"'{pattern}' matches no function of '{path}'")
        elif not taken:
            self._diagnostics.error(
                span, f"'{pattern}' matches no function of '{path}' that can carry a probe: {self.left_out[-1].reason}"
            )

    def _reason_against(self, symbol: KernelSymbol, place: tuple[int, bool]) -> str | None:
        if place in self._places:
            return TAKEN
        if (reason := self._kernel.refusal(symbol.address)) is not None:
            return reason
        if self._kernel.is_traceable(symbol.address) is False:
            return "ftrace cannot redirect it (it is not among available_filter_functions)"
        return None


def _patched(origin: str, instruction: DecodedInstruction) -> str:
    """Return, as a clause, the reason why an instruction of a kernel's file may not be the running one."""
    return f"the kernel patches such code when it runs, and {origin} has '{instruction.text}' there"


# Programs that are compiled for builds of the kernel: the data of each build, and the selection of the running one.
# A build is resolved as the running kernel is, and the symbols that are used on the way are carried.


def build_kernel(
    program: Program, path: Path, diagnostics: Diagnostics, extra_symbols: Path | None = None
) -> CarriedKernel:
    """
    Return the data that a program needs about the kernel or module in a file; KALLSYMS stands for the running one.

    Add errors and warnings for the program to ``diagnostics``; raise ``TargetError`` for another kind of file.
    """
    from dprobes.target.kernel.kernel_image import KernelFile, running_areas

    name = module_named_by(program)
    if path == KALLSYMS:
        symbols = NeededKallsyms.read()
        kernel = RunningKernel(symbols)
        identity, areas = running_build_id(name), running_areas(kernel, name)
    else:
        file = KernelFile(path, name, extra_symbols)
        identity, areas, symbols, kernel = file.identity, file.areas, file.symbols, file.kernel()
    module = kernel_module_of(program, kernel)
    for span in _addresses(program):
        diagnostics.warning(
            span,
            "an address is that of one kernel after one boot: another one has something else there",
            hint="write a symbol, or 'offset =', which counts from the start of the kernel or module",
        )
    resolved = resolve_kernel(program, module, host_architecture(), diagnostics, with_tracepoints=False)
    diagnostics.raise_if_errors()
    symbols.need_names(probe.instruction.address for probe in resolved.in_code)
    places = (
        KernelPlace(probe.number, probe.instruction.address, probe.instruction.raw, probe.where)
        for probe in resolved.in_code
        if probe.instruction.raw
    )
    return CarriedKernel(identity, str(path), name, areas, symbols.needed, tuple(places))


def kernel_here(
    program: Program, carried: Sequence[CarriedKernel], running: RunningKernel, diagnostics: Diagnostics
) -> RunningKernel:
    """
    Return the running kernel with its carried data, or unchanged with a note if there is none.

    Raise ``TargetError`` if this is a carried build, and its address is not known.
    """
    name = module_named_by(program)
    if not carried or (name and name not in running.modules):
        return running
    span = program.spans.get("name")
    try:
        identity = running_build_id(name)
    except TargetError as error:
        diagnostics.note(span, f"the kernel that the program was built for is unknown: {error.message}")
        return running
    from dprobes.target.kernel.kernel_image import moved_kernel

    same = next((kernel for kernel in carried if kernel.identity == identity), None)
    if same is not None:
        return moved_kernel(same, running)
    what = f"the module '{name}'" if name else "the kernel"
    known = ", ".join(f"{kernel.identity} ('{kernel.path}')" for kernel in carried)
    diagnostics.note(
        span,
        f"this is build {identity} of {what}, and the program was built for {known}: places are found by their names",
    )
    for number in _numbers(program):
        diagnostics.error(
            number,
            "an offset without a symbol is that of one build, and this is another one",
            hint="build the program for this kernel too (dprobes build --for FILE)",
        )
    return running


def _addresses(program: Program) -> Iterator[Span | None]:
    """Iterate over the spans of the places in code that a program writes as an address without a symbol."""
    for definition in program.definitions:
        match definition.location:
            case Address(Expression(_, None)) if definition.watchpoint is None:
                yield definition.span("address")


def _numbers(program: Program) -> Iterator[Span | None]:
    """Iterate over the spans of the places in code that a program writes as an offset without a symbol."""
    for definition in program.definitions:
        match definition.location:
            case Offset(Expression(_, None)):
                yield definition.span("offset")
