"""Inserting a program: from a PPDF to a session that the manager follows."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.diagnostics import Diagnostics, Note, Severity
from dprobes.engines.companions import prepared_companions, tool_error
from dprobes.engines.followedprogram import GONE
from dprobes.engines.insertion import insertion
from dprobes.engines.interface import Notice
from dprobes.engines.options import MachineKnowledge
from dprobes.errors import ManagerError, NotSupportedError
from dprobes.formatters.tablenames import has_addresses
from dprobes.formatters.templates.derived import derived_templates
from dprobes.manager.descriptions import describe_scope
from dprobes.manager.insertedprogram import InsertedProgram
from dprobes.manager.sharedfiles import HeldFiles, SharingSymbols
from dprobes.record.origin import RecordSource
from dprobes.rpn.groups import select_all, without_opcodes
from dprobes.rpn.joined import joined_program
from dprobes.rpn.program import ModuleType
from dprobes.target.carriedsymbols import CarriedSymbols, OtherBuild
from dprobes.target.processimages import ProcessImages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dprobes.engines.companions import PreparedCompanions
    from dprobes.engines.insertion import Prepared
    from dprobes.engines.interface import Scope
    from dprobes.engines.sharedglobals import GlobalVariables
    from dprobes.manager.arguments import Insertion
    from dprobes.manager.recorder import Recording
    from dprobes.ppdf.model import Ppdf
    from dprobes.resolve.localmodule import Compiled
    from dprobes.resolve.probepoints import Probepoint
    from dprobes.rpn.program import Program

__all__ = ["Inserter", "ring_size"]

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
