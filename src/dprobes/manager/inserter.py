"""Inserting a program: from a PPDF to a session that the manager follows."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from dprobes.diagnostics import Diagnostics, Note, Severity
from dprobes.engines.companion_programs import prepared_companions, tool_error
from dprobes.engines.engine_interface import Notice, Scope
from dprobes.engines.engine_options import EngineOptions, MachineKnowledge
from dprobes.engines.engine_registry import AUTO, engine_row, named_engine
from dprobes.engines.followed_program import GONE
from dprobes.engines.insertion import insertion
from dprobes.engines.overhead_budget import overhead_of
from dprobes.errors import EngineError, ManagerError, NotSupportedError
from dprobes.formatters.table_addresses import has_addresses
from dprobes.formatters.templates.derived_templates import derived_templates
from dprobes.manager.managed_program import InsertedProgram, describe_scope
from dprobes.record.log_record import ABOUT_RECORDS, Item
from dprobes.record.record_origin import RecordSource
from dprobes.rpn.rpn_program import ModuleType, joined_program, select_all, without_opcodes
from dprobes.sinks.sink_interface import LOG_FORMATS
from dprobes.target.carried_symbols import CarriedSymbols, OtherBuild
from dprobes.target.process_images import ProcessImages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dprobes.engines.companion_programs import PreparedCompanions
    from dprobes.engines.insertion import Prepared
    from dprobes.engines.shared_globals import GlobalVariables
    from dprobes.manager.manager_messages import InsertArguments, ScopeArguments
    from dprobes.manager.recorder import Recording
    from dprobes.ppdf.ppdf_model import Ppdf
    from dprobes.resolve.local_module import Compiled
    from dprobes.resolve.probepoints import Probepoint
    from dprobes.rpn.rpn_program import Program
    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.kernel.kernel_symbols import CarriedKernel
    from dprobes.target.probed_module import Module, SymbolProvider

__all__ = ["HeldFiles", "Inserter", "SharingSymbols", "check_format", "checked_insertion", "ring_size"]

# The arguments of the manager's verbs, checked and converted to the values that other modules take.


_NAME_MAX = 255
"""Bytes of a program's name, as of a file's (NAME_MAX of limits.h)."""

_SHOWN = 40
"""Characters of a name that is refused that are shown."""


@dataclass(slots=True)
class Insertion:
    """
    Say what is to be inserted, and how.

    ``name`` is the one that the user gives it, None for the module's. ``uses_own_symbols`` allows modules of which the
    PPDF knows nothing. ``directory`` is the client's current one. ``targets`` get the records, in ``format``. Handlers
    are executed for the hits that all ``filters`` hold for.
    ``reason`` is filled in by whoever chooses the engine.
    """

    ppdf: Ppdf
    data: bytes
    scope: Scope
    options: EngineOptions
    name: str | None = None
    merges: bool = False
    replaces: bool = False
    groups: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()
    engine: str = AUTO
    items: Item = field(default=Item.MAJOR | Item.MINOR)
    verifies_opcodes: bool = True
    verifies_build_id: bool = True
    uses_own_symbols: bool = False
    directory: str = "/"
    targets: tuple[str, ...] = ()
    format: str = "text"
    reason: str | None = None


def checked_insertion(given: InsertArguments) -> Insertion:
    """Return what ``insert`` is to do; raise ``FormatError`` for a PPDF that is none, and ``ManagerError``."""
    from dprobes.ppdf.ppdf_file import decode

    if given.merge and given.replace:
        raise ManagerError("a program is either merged (--merge) or replaces another one (--replace)")
    items = Item(given.items)
    engine, endpoint = _engine(given.engine)
    return Insertion(
        ppdf=decode(given.ppdf),
        data=given.ppdf,
        scope=replace(_scope(given.scope), endpoint=endpoint),
        options=EngineOptions(
            allow_write=given.allow_write,
            core_directory=given.core_directory or ".",
            overhead=_overhead(given.overhead),
            own={
                "pid_namespace": given.pid_namespace,
                "exact": given.exact,
                **({} if given.ring_size is None else {"ring_size": given.ring_size}),
            },
        ),
        name=_program_name(given.name),
        merges=given.merge,
        replaces=given.replace,
        groups=given.groups,
        types=given.types,
        filters=given.filters,
        engine=engine,
        items=(items & sum(Item)) & ~ABOUT_RECORDS | Item.MAJOR | Item.MINOR,
        verifies_opcodes=given.verify_opcodes,
        verifies_build_id=given.verify_build_id,
        uses_own_symbols=given.own_symbols,
        directory=given.directory or "/",
        targets=given.targets,
        format=check_format(given.format),
    )


def _engine(text: str) -> tuple[str, str | None]:
    """Return the name of an engine, and its endpoint if it has one."""
    try:
        name, argument = named_engine(text)
    except EngineError as error:
        raise ManagerError(error.message, hint=error.hint) from None
    if name != AUTO and not engine_row(name).is_managed:
        raise ManagerError(f"a program that is inserted cannot have the {name} engine", hint="use 'dprobes run'")
    return name, argument


def _overhead(given: str | None) -> float | None:
    try:
        return None if given is None else overhead_of(given)
    except EngineError as error:
        raise ManagerError(error.message, hint=error.hint) from None


def _scope(given: ScopeArguments) -> Scope:
    scope = Scope(pid=given.pid, cgroup=given.cgroup, uid=given.uid, follow=given.follow, program=given.program)
    if scope.program is not None and (scope.pid is None or not scope.program.startswith("/")):
        raise ManagerError("'program' of a scope is the path of what its process 'pid' is about to execute")
    if sum(each is not None for each in (scope.pid, scope.cgroup, scope.uid)) > 1:
        raise ManagerError("a scope is one of a process, a cgroup, and a user")
    return scope


def _program_name(name: str | None) -> str | None:
    """Return the name that a program is to have, which is printed in tables; None if it was not given."""
    if name is not None and (not name.isprintable() or not 0 < len(os.fsencode(name)) <= _NAME_MAX):
        shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..."
        raise ManagerError(
            f"a program cannot be named {shown!r}",
            hint=f"a name is a string of 1 to {_NAME_MAX} bytes without control characters",
        )
    return name


def check_format(name: str) -> str:
    """Return the name of a formatter; raise ``ManagerError`` if there is none of that name."""
    if name not in LOG_FORMATS:
        raise ManagerError(f"there is no format '{name}'", hint=f"formats are {', '.join(LOG_FORMATS)}")
    return name


# The files that programs of a manager are for: their bytes are held once, however many programs there are.


class HeldFiles:
    """Know the files that somebody holds; any thread may ask."""

    def __init__(self) -> None:
        self._files: WeakValueDictionary[tuple[str, str | None, int], ElfFile] = WeakValueDictionary()
        self._lock = threading.Lock()

    def same(self, elf: ElfFile) -> ElfFile:
        """Return the file that is held already if it is the same to the byte, else the one that is given."""
        key = (str(elf.path), elf.build_id, len(elf.data))
        with self._lock:
            held = self._files.get(key)
            if held is None or held.data != elf.data:
                self._files[key] = held = elf
            return held


@dataclass(frozen=True, slots=True)
class SharingSymbols:
    """Give the modules that another provider gives, of files that are held once."""

    symbols: SymbolProvider
    files: HeldFiles

    def module_of(self, elf: ElfFile) -> Module:
        """Return the module in a file; raise ``TargetError`` as the other provider does."""
        return self.symbols.module_of(self.files.same(elf))

    def machine(self, host: str) -> str | None:
        """Return what the other provider does."""
        return self.symbols.machine(host)

    @property
    def kernels(self) -> tuple[CarriedKernel, ...]:
        """What the other provider has."""
        return self.symbols.kernels

    def __reduce__(self) -> tuple[object, ...]:
        """Be the other provider in another process, which shares no memory."""
        return _itself, (self.symbols,)


def _itself(symbols: SymbolProvider) -> SymbolProvider:
    return symbols


_BEGINNING = 20.0
"""Seconds that an insertion waits until what is there has been probed."""


_RING_MAX, _RING_MIN = 4 << 20, 1 << 18
"""Bytes of a ring where the user does not say how many: in one beside no others, and in one beside hundreds."""

_RING_SHARE = 32 << 20
"""Bytes that the rings of as many programs as there are would take, if all were as large as the newest one."""


def ring_size(others: int) -> int:
    """Return the size of the ring for a program beside so many others: the kernel takes the memory for it at once."""
    share = _RING_SHARE // (others + 1)
    return max(_RING_MIN, min(_RING_MAX, 1 << (share.bit_length() - 1)))


class Inserter:
    """Insert programs for a manager; what is known of the kernel is found out once."""

    def __init__(self, recording: Recording, globals_: GlobalVariables) -> None:
        self._recording = recording
        self._globals = globals_
        self._knowledge = MachineKnowledge()
        self._files = HeldFiles()

    def insert(
        self,
        name: str,
        request: Insertion,
        present: list[InsertedProgram],
        beside: list[InsertedProgram],
        notify: Callable[[Notice], None],
    ) -> InsertedProgram:
        """
        Insert a program under a name; ``present`` are those of that name which it is merged with, or replaces.

        ``beside`` are all that are inserted: one of them may follow the process in scope already.

        Raise an error of ours if that cannot be: what is inserted already stays as it is.
        """
        if request.ppdf.blocks is not None:
            raise tool_error(request.ppdf.blocks)
        whole = [_with_absolute_name(each.program, request.directory) for each in request.ppdf.members]
        programs = list(select_all(whole, request.groups, request.types))
        if not request.verifies_opcodes:
            programs = [without_opcodes(program) for program in programs]
        replaced = present[0] if request.replaces and present else None
        own = request.options.own
        options = replace(
            request.options,
            replaceable=True,
            own={"ring_size": ring_size(len(beside)), **own},
            knowledge=self._knowledge,
        )
        sessions = [each.session for each in beside]
        where = insertion(request.engine, request.scope, options, replaces=replaced, beside=sessions)
        symbols = [SharingSymbols(self._symbols_of(each, request), self._files) for each in request.ppdf.members]
        prepared: Prepared | PreparedCompanions
        if len(programs) > 1:
            prepared = prepared_companions(where, programs, Diagnostics(), symbols, request.filters)
            members = [each.compiled for each in prepared.members]
        else:
            prepared = where.prepare(programs[0], Diagnostics(), symbols[0], filters=request.filters)
            members = [prepared.compiled]
        compiled = prepared.compiled
        if request.merges:
            for each in members:
                _check_apart(each, present)
        engine = prepared.engine.name
        request.reason = prepared.reason
        if text := compiled.render(Severity.WARNING, *((Severity.NOTE,) if compiled.resolved is None else ())):
            has_warnings = any(d.severity is Severity.WARNING for d in compiled.diagnostics)
            notify(Notice(f"the program '{name}' has {'warnings' if has_warnings else 'notes'}", details=text))
        if replaced is not None:
            _check_replaceable(replaced, engine, request.scope)
        return self._enter(name, prepared, request, derived_templates(joined_program(programs)))

    @staticmethod
    def _symbols_of(ppdf: Ppdf, request: Insertion) -> CarriedSymbols:
        other = OtherBuild.OWN_SYMBOLS if request.uses_own_symbols else OtherBuild.REFUSE
        if not request.verifies_build_id:
            other = OtherBuild.NEAREST
        return CarriedSymbols(ppdf.builds, ppdf.program.name, other, request.verifies_opcodes, ppdf.kernels)

    def _enter(
        self, name: str, prepared: Prepared | PreparedCompanions, request: Insertion, derived: dict[int, str]
    ) -> InsertedProgram:
        """Insert a program whose records are shown by ``derived`` templates where there are no others."""
        program = prepared.compiled.program
        source = RecordSource(
            0,
            name,
            program.name,
            program.major,
            templates=request.ppdf.templates,
            derived=derived,
        )
        is_anywhere = program.modtype is ModuleType.USER and any(not each.is_in_code for each in program.definitions)
        if source.may_show_addresses or is_anywhere or has_addresses(program.tables):
            source = replace(source, images=ProcessImages())
        source = replace(source, kernel=prepared.engine.records_kernel)
        session = prepared.session(request.items, self._globals, source.images)
        session.__enter__()
        try:
            inserted = InsertedProgram(
                name,
                program,
                session,
                self._recording.open_program(source),
                engine=prepared.engine.name,
                scope=request.scope,
                data=request.data,
                groups=request.groups,
                types=request.types,
                filters=request.filters,
                targets=request.targets,
            )
        except BaseException as error:
            session.__exit__(type(error), error, error.__traceback__)  # nobody else knows of it
            raise
        inserted.start(_BEGINNING)
        return inserted


def _check_replaceable(replaced: InsertedProgram, engine: str, scope: Scope) -> None:
    """Raise an error of ours if a program cannot be replaced by one of an engine in a scope."""
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
    """Return a program whose module, if it is named by a path, is named by an absolute one."""
    name = program.name
    if "/" not in name or name.startswith("/"):
        return program
    return replace(program, name=os.path.normpath(os.path.join(directory, name)))  # noqa: PTH118 - text


def _places(inserted: InsertedProgram) -> Iterator[Probepoint]:
    states = zip(inserted.probes, inserted.states(), strict=False)
    return (probe for probe, (state, _) in states if probe.is_in_code and state not in GONE)


def _check_apart(compiled: Compiled, present: Iterable[InsertedProgram]) -> None:
    """Raise ``SourceError`` if a program has a probepoint where one of its name has one that is not gone."""
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
