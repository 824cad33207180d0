"""Programs for several modules that were written as one: where their probepoints are, and the engine for all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.diagnostics import Diagnostics
from dprobes.engines.companionsession import CompanionSession
from dprobes.engines.registry import candidates, engine_row
from dprobes.errors import DprobesError, EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.engines.insertion import Insertion, Prepared
    from dprobes.engines.interface import Engine
    from dprobes.record.layout import Item
    from dprobes.resolve.localmodule import Compiled
    from dprobes.rpn.program import Program
    from dprobes.target.location import SymbolProvider
    from dprobes.target.processimages import ProcessImages

__all__ = ["PreparedCompanions", "joined_program", "prepared_companions"]


def joined_program(programs: Sequence[Program]) -> Program:
    """Return a program with the definitions of all, for people: its probepoints are in several modules."""
    first = programs[0]
    return replace(first, definitions=tuple(each for program in programs for each in program.definitions))


def prepared_companions(
    where: Insertion,
    programs: Sequence[Program],
    diagnostics: Diagnostics,
    symbols: SymbolProvider,
    filters: Sequence[str] = (),
) -> PreparedCompanions:
    """
    Find the probepoints of programs that are inserted as one, and the engine that can run them all.

    Raise an error of ours if something is wrong with one, or no engine can run all of them.
    """
    found, error = _prepared(where, programs, diagnostics, symbols, filters)
    reasons = {} if found is None else {each.engine.name: each.reason for each in found.members}
    if len(reasons) > 1:
        # Only where the engine was to be chosen: one has to do for all, best the one that only some need.
        for name in [row.name for row in reversed(candidates()) if row.name in reasons]:
            found, error = _prepared(replace(where, engine=name), programs, diagnostics, symbols, filters)
            if found is not None:
                found.reason = reasons[name]
                break
    if found is None:
        assert error is not None
        raise error
    name = found.engine.name
    if not engine_row(name).shares_variables:
        raise EngineError(
            f"the {name} engine cannot run programs that share their variables and tables",
            hint="write one program for each module, without 'begin', 'end' and 'every'",
        )
    return found


def _prepared(
    where: Insertion,
    programs: Sequence[Program],
    diagnostics: Diagnostics,
    symbols: SymbolProvider,
    filters: Sequence[str],
) -> tuple[PreparedCompanions | None, DprobesError | None]:
    own = Diagnostics()
    own.extend(diagnostics)
    try:
        members = [where.prepare(each, own, symbols, filters=filters) for each in programs]
        for each in members:
            _ = each.engine
    except DprobesError as error:
        return None, error
    return PreparedCompanions(members, own), None


class PreparedCompanions:
    """Programs that are checked and resolved, and their engine (``insertion.Prepared``)."""

    def __init__(self, members: Sequence[Prepared], diagnostics: Diagnostics) -> None:
        self.members = members
        self._diagnostics = diagnostics
        self.reason = next((each.reason for each in members if each.reason), members[0].reason)
        """Why ``auto`` takes the engine that it takes; None if the engine was named."""

    @property
    def compiled(self) -> Compiled:
        """The first program as it was resolved, with the definitions of all."""
        first = self.members[0].compiled
        program = joined_program([each.compiled.program for each in self.members])
        return replace(first, program=program, diagnostics=self._diagnostics)

    @property
    def engine(self) -> Engine:
        """The engine that runs all of them."""
        return self.members[0].engine

    def session(self, items: Item, images: ProcessImages | None = None) -> CompanionSession:
        """Return the session, which inserts the programs when it is entered; records carry the header items."""
        jobs = [each.job(items, None, images) for each in self.members]
        return CompanionSession([each.engine for each in self.members], jobs)
