"""Insertion of a program: from a PPDF to a program that the manager follows."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from dprobes.diagnostics import Diagnostics, Note, Severity
from dprobes.engines.engine_interface import MachineKnowledge, Notice, Scope
from dprobes.errors import ManagerError, NotSupportedError
from dprobes.formatters.table_addresses import has_addresses
from dprobes.manager.managed_program import InsertedProgram, describe_scope
from dprobes.rpn.rpn_program import ModuleType, joined_program, select_all, without_opcodes
from dprobes.runs.followed_program import GONE
from dprobes.runs.run_steps import Face, ProgramInput, record_source, run_program, tool_error
from dprobes.target.carried_symbols import CarriedSymbols, OtherBuild

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dprobes.engines.engine_interface import Attachment
    from dprobes.engines.shared_globals import GlobalVariables
    from dprobes.manager.insert_request import InsertRequest
    from dprobes.manager.manager_messages import InsertArguments
    from dprobes.manager.recorder import Recording
    from dprobes.ppdf.ppdf_model import Ppdf
    from dprobes.resolve.local_module import ResolvedProgram
    from dprobes.resolve.probepoints import Probepoint
    from dprobes.rpn.rpn_program import ProbeDefinition, Program
    from dprobes.runs.run_steps import Resolution, RunPlan, Vantage
    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.kernel.kernel_symbols import CarriedKernel
    from dprobes.target.probed_module import Module, SymbolProvider

__all__ = ["HeldFiles", "Inserter", "SharingSymbols", "ring_size"]

# The module files of a manager's programs: the contents of each are held once, however many programs there are.


class HeldFiles:
    """
    The module files of inserted programs, so that identical files are in memory once.

    Any thread may call the methods.
    """

    def __init__(self) -> None:
        self._files: WeakValueDictionary[tuple[str, str | None, int], ElfFile] = WeakValueDictionary()
        self._lock = threading.Lock()

    def same(self, elf: ElfFile) -> ElfFile:
        """Return the stored file with the contents of ``elf``; store and return ``elf`` itself if there is none."""
        key = (str(elf.path), elf.build_id, len(elf.data))
        with self._lock:
            held = self._files.get(key)
            if held is None or held.data != elf.data:
                self._files[key] = held = elf
            return held


@dataclass(frozen=True, slots=True)
class SharingSymbols:
    """A provider of the modules of another provider, with identical files in memory once."""

    symbols: SymbolProvider
    files: HeldFiles

    def module_of(self, elf: ElfFile) -> Module:
        """Return the module in a file; equal files are kept only once. Raise the ``TargetError`` of ``symbols``."""
        return self.symbols.module_of(self.files.same(elf))

    def machine(self, host: str) -> str | None:
        """Return the processor of the module to search on a machine ``host``; None means ``host`` itself."""
        return self.symbols.machine(host)

    @property
    def kernels(self) -> tuple[CarriedKernel, ...]:
        """The kernels of the other provider."""
        return self.symbols.kernels

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as the other provider: another process shares no memory."""
        return _itself, (self.symbols,)


def _itself(symbols: SymbolProvider) -> SymbolProvider:
    return symbols


_RING_MAX, _RING_MIN = 4 << 20, 1 << 18
"""Default sizes of a ring in bytes: without other programs, and with hundreds of them."""

_RING_SHARE = 32 << 20
"""Total size in bytes of all rings if all are as large as the new one. The limits for a single ring come first."""


def ring_size(others: int) -> int:
    """Return the size in bytes of a ring with ``others`` other programs; the kernel allocates the memory at once."""
    share = _RING_SHARE // (others + 1)
    return max(_RING_MIN, min(_RING_MAX, 1 << (share.bit_length() - 1)))


class Inserter:
    """An inserter of a manager's programs; properties of the kernel are determined once."""

    def __init__(self, recording: Recording, globals_: GlobalVariables) -> None:
        self._recording = recording
        self._globals = globals_
        self._knowledge = MachineKnowledge()
        self._files = HeldFiles()

    def insert(
        self,
        name: str,
        given: InsertRequest,
        present: list[InsertedProgram],
        beside: list[InsertedProgram],
        notify: Callable[[Notice], None],
    ) -> InsertedProgram:
        """
        Insert a program under a name. ``present`` has the programs of that name, which it is merged with, or replaces.

        ``beside`` has all inserted programs, because one of them may already follow the process in scope. Raise a
        subclass of ``DprobesError`` on failure; earlier programs have not changed then.
        """
        arguments = given.arguments
        if given.ppdf.blocks is not None:
            raise tool_error(given.ppdf.blocks)
        whole = [_with_absolute_name(each.program, arguments.directory or "/") for each in given.ppdf.members]
        programs = tuple(select_all(whole, arguments.groups, arguments.types))
        if not arguments.verify_opcodes:
            programs = tuple(map(without_opcodes, programs))
        request = given.request._replace(
            options=replace(
                given.request.options,
                own={"ring_size": ring_size(len(beside)), **given.request.options.own},
                knowledge=self._knowledge,
            ),
            replaces=present[0] if arguments.replace and present else None,
            beside=tuple(each.attachment for each in beside),
            globals=self._globals,
        )
        symbols = tuple(SharingSymbols(_symbols_of(each, arguments), self._files) for each in given.ppdf.members)
        return run_program(request, _ManagerFace(name, given, programs, symbols, present, notify, self._recording))


def _symbols_of(ppdf: Ppdf, given: InsertArguments) -> CarriedSymbols:
    other = OtherBuild.OWN_SYMBOLS if given.own_symbols else OtherBuild.REFUSE
    if not given.verify_build_id:
        other = OtherBuild.NEAREST
    return CarriedSymbols(ppdf.builds, ppdf.program.name, other, given.verify_opcodes, ppdf.kernels)


@dataclass(frozen=True, slots=True)
class _ManagerFace(Face[InsertedProgram]):
    """``Face`` of a program that the manager inserts: warnings go to the client, records to the manager's recording."""

    name: str
    given: InsertRequest
    programs: tuple[Program, ...]
    symbols: tuple[SymbolProvider, ...]
    present: list[InsertedProgram]
    notify: Callable[[Notice], None]
    recording: Recording

    def load(self, vantage: Vantage) -> ProgramInput:  # noqa: ARG002 - it was compiled elsewhere
        """Return the program of the request, with the information for its records."""
        program = joined_program(self.programs)
        is_anywhere = program.modtype is ModuleType.USER and any(not each.is_in_code for each in program.definitions)
        source = record_source(
            program,
            self.given.ppdf.templates,
            name=self.name,
            names_addresses=is_anywhere or has_addresses(program.tables),
        )
        return ProgramInput(
            self.programs,
            self.symbols,
            Diagnostics(),
            source,
            self.given.items,
            self.given.arguments.filters,
            is_group=len(self.programs) > 1,
        )

    def check(self, resolution: Resolution) -> None:
        """Raise an error if a probepoint is at the place of one of the programs with which this one is merged."""
        if self.given.arguments.merge:
            for each in resolution.compiled:
                _check_apart(each, self.present)

    def announce(self, planned: RunPlan) -> None:
        """Send warnings to the client; raise an error if the engine cannot replace the inserted program."""
        compiled = planned.compiled
        if text := compiled.render(Severity.WARNING, *((Severity.NOTE,) if compiled.resolved is None else ())):
            has_warnings = any(d.severity is Severity.WARNING for d in compiled.diagnostics)
            what = "warnings" if has_warnings else "notes"
            self.notify(Notice(f"the program '{self.name}' has {what}", details=text))
        if self.given.arguments.replace and self.present:
            _check_replaceable(self.present[0], planned.engine, self.given.request.scope)

    def follow(self, planned: RunPlan, attachment: Attachment) -> InsertedProgram:
        """Start a thread that follows the program, and return when everything in scope is probed."""
        try:
            inserted = InsertedProgram(
                self.name,
                planned.compiled.program,
                attachment,
                self.recording.open_program(planned.source),
                planned,
                self.given,
            )
        except BaseException:
            attachment.close()  # nothing else refers to it
            raise
        inserted.start()
        return inserted


def _check_replaceable(replaced: InsertedProgram, engine: str, scope: Scope) -> None:
    """Raise an error if a program cannot be replaced by one with this engine and scope."""
    if replaced.engine != engine:
        raise NotSupportedError(
            f"a program of the {replaced.engine} engine cannot be replaced by one of the {engine} engine",
            hint=f"insert it with --engine {replaced.engine}, or remove the other one first",
        )
    if describe_scope(replaced.scope) != describe_scope(scope):
        raise ManagerError(
            "a program can be replaced by one for the same processes only",
            hint="give the same -p, --cgroup or --uid, or remove the other one first",
        )


def _with_absolute_name(program: Program, directory: str) -> Program:
    """Return a program in which relative paths of module and patches are resolved in ``directory``, the client's."""
    if any(definition.patch is not None for definition in program.definitions):
        definitions = tuple(_with_absolute_patch(each, directory) for each in program.definitions)
        program = replace(program, definitions=definitions)
    name = program.name
    if "/" not in name or name.startswith("/"):
        return program
    return replace(program, name=os.path.normpath(os.path.join(directory, name)))  # noqa: PTH118 - text


def _with_absolute_patch(definition: ProbeDefinition, directory: str) -> ProbeDefinition:
    if definition.patch is None:
        return definition
    return replace(definition, patch=os.path.normpath(os.path.join(directory, definition.patch)))  # noqa: PTH118 - text


def _places(inserted: InsertedProgram) -> Iterator[Probepoint]:
    states = zip(inserted.probes, inserted.states(), strict=False)
    return (probe for probe, (state, _) in states if probe.is_in_code and state not in GONE)


def _check_apart(compiled: ResolvedProgram, present: Iterable[InsertedProgram]) -> None:
    """Raise ``SourceError`` if a program has a probepoint at the place of an active one of the same name."""
    if compiled.resolved is None:
        return
    taken = {probe.place: probe for each in present for probe in _places(each)}
    diagnostics = compiled.diagnostics
    for probe in compiled.resolved.in_code:
        other = taken.get(probe.place)
        if other is not None:
            diagnostics.error(
                probe.definition.span("offset"),
                f"the program that is inserted already has a probepoint at offset {probe.offset:#x} of '{probe.path}'",
                notes=(Note("it is here", other.definition.span("offset")),),
                hint="--replace replaces the whole program, --as NAME inserts this one too",
            )
    diagnostics.raise_if_errors()
