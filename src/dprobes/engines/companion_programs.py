"""Programs for several modules that were written as one: where their probepoints are, and the engine for all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from dprobes.diagnostics import Diagnostics
from dprobes.engines.companion_session import CompanionSession
from dprobes.engines.engine_registry import candidates, engine_row, faster_row
from dprobes.errors import DprobesError, EngineError
from dprobes.rpn.rpn_program import joined_program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.dpc.tool_block import ToolProgram
    from dprobes.engines.engine_interface import Engine
    from dprobes.engines.insertion import Insertion, Prepared
    from dprobes.engines.shared_globals import GlobalVariables
    from dprobes.record.log_record import Item
    from dprobes.resolve.local_module import Compiled
    from dprobes.rpn.rpn_program import Program
    from dprobes.target.probed_module import SymbolProvider
    from dprobes.target.process_images import ProcessImages

__all__ = ["PreparedCompanions", "prepared_companions", "tool_error"]


def tool_error(tool: ToolProgram) -> EngineError:
    """Return the error that nobody executes the blocks of a program here."""
    written = tool.blocks[0].block.written
    return EngineError(
        f"the program has a block '{written}', which only 'dprobes run' executes",
        hint="run it with 'dprobes run', or leave out 'begin', 'every' and 'end'",
    )


def prepared_companions(
    where: Insertion,
    programs: Sequence[Program],
    diagnostics: Diagnostics,
    symbols: Sequence[SymbolProvider],
    filters: Sequence[str] = (),
    *,
    allow_write: bool = False,
) -> PreparedCompanions:
    """
    Find the probepoints of programs that are inserted as one, and the engine that can run them all.

    ``symbols`` has what is known of the symbols of each. ``allow_write`` allows what the options do not.

    Raise an error of ours if something is wrong with one, or no engine can run all of them.
    """
    if where.replaces is not None:
        raise EngineError(
            "a program for several modules cannot take the place of another one", hint="remove the other one first"
        )
    each = _Each(tuple(programs), diagnostics, tuple(symbols), tuple(filters), allow_write)
    found, error = each.prepared(where)
    reasons = {} if found is None else {member.engine.name: member.reason for member in found.members}
    if len(reasons) > 1:
        # Only where the engine was to be chosen: one has to do for all, best the one that only some need.
        able = [each for row in reversed(candidates()) for each in (faster_row(row.name), row) if each is not None]
        for name in [row.name for row in able if row.name in reasons]:
            found, error = each.prepared(replace(where, engine=name))
            if found is not None:
                found.reason = reasons[name]
                break
    if found is None:
        assert error is not None
        raise error
    name = found.engine.name
    if len(programs) > 1 and not engine_row(name).shares_variables:
        raise EngineError(f"the {name} engine probes one module at a time", hint="write one program for each module")
    return found


class _Each(NamedTuple):
    """What each of the programs is prepared with."""

    programs: tuple[Program, ...]
    diagnostics: Diagnostics
    symbols: tuple[SymbolProvider, ...]
    filters: tuple[str, ...]
    allow_write: bool

    def prepared(self, where: Insertion) -> tuple[PreparedCompanions | None, DprobesError | None]:
        own = Diagnostics()
        own.extend(self.diagnostics)
        try:
            members = [
                where.prepare(program, own, known, allow_write=self.allow_write, filters=self.filters)
                for program, known in zip(self.programs, self.symbols, strict=True)
            ]
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

    def session(
        self, items: Item, globals_: GlobalVariables | None = None, images: ProcessImages | None = None
    ) -> CompanionSession:
        """Return the session, which inserts the programs when it is entered; records carry the header items."""
        jobs = [each.job(items, globals_, images) for each in self.members]
        return CompanionSession([each.engine for each in self.members], jobs)
