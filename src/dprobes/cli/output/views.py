"""The views of a run that replace records: ``--top``, ``--count``, ``--hist``, ``--sum`` and ``--stacks``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal

from dprobes.record.layout import Item

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from dprobes.cli.output.handleraggregates import HandlerAggregates
    from dprobes.cli.output.stackprofiles import StacksOptions
    from dprobes.cli.output.top import TopView
    from dprobes.cli.output.wantedfields import WantedFields
    from dprobes.engines.interface import ControlledSession
    from dprobes.record.origin import RecordSource
    from dprobes.rpn.program import Program
    from dprobes.sinks.aggregates import Aggregates
    from dprobes.sinks.interface import Sink
    from dprobes.sinks.stacks.collector import StackCollector

__all__ = ["Views"]


class Views:
    """Hold what was asked for: ``sinks`` are to get the records, and ``items`` to be in their headers."""

    def __init__(
        self,
        counted: Sequence[str],
        measured: Sequence[str],
        summed: Sequence[str] = (),
        by: Sequence[str] = (),
        *,
        top: bool,
        stacks: StacksOptions | None = None,
    ) -> None:
        self.items = Item(0)
        self.sinks: list[Sink] = []
        self._aggregates: Aggregates | None = None
        self._top: TopView | None = None
        self._stacks: StackCollector | None = None
        self._stacks_options = stacks
        self._at_hits: HandlerAggregates | None = None
        self._wanted: WantedFields | None = None
        if counted or measured or summed or by:
            from dprobes.cli.output.aggregation import aggregates_of
            from dprobes.cli.output.wantedfields import WantedFields

            self._wanted = WantedFields.of_options(counted, measured, summed, by)
            self.items = self._wanted.items
            self._aggregates = aggregates_of(self._wanted)
            self.sinks.append(self._aggregates)
        if stacks is not None:
            from dprobes.cli.output.stackprofiles import check_stacks_target, is_perfetto
            from dprobes.sinks.stacks.collector import StackCollector

            check_stacks_target(stacks.target)
            self.items |= Item.PID | Item.PROCESS_NAME | Item.CS | Item.IP
            if is_trace := is_perfetto(stacks.target):
                self.items |= Item.TIME | Item.TID | Item.CPU
            self._stacks = StackCollector(stacks.weight, keeps_samples=is_trace)
            self.sinks.append(self._stacks)
        if top:
            from dprobes.cli.output.top import TopView

            self._top = TopView()
            self.sinks.append(self._top)

    @property
    def names_functions(self) -> bool:
        """Whether the functions of records are counted."""
        return self._wanted is not None and "function" in self._wanted.all

    def check(self, source: RecordSource) -> None:
        """Raise ``FormatError`` if the program's records can have none of the fields that are asked for."""
        if self._aggregates is not None:
            self._aggregates.check(source)

    def at_the_hit(self, program: Program, source: RecordSource, *, carries: bool, verbose: bool) -> Program:
        """
        Return a program that counts what is to be counted at the hit, or the same one where records are needed.

        ``carries`` says that somebody else gets the records; ``verbose`` has it said which way is taken.
        """
        if self._wanted is None:
            return program
        from dprobes.cli import console
        from dprobes.cli.output.handleraggregates import HandlerAggregates, NotAtTheHitError

        carries = carries or self._top is not None or self._stacks is not None
        try:
            self._at_hits = HandlerAggregates(program, source, self._wanted, carries=carries)
        except NotAtTheHitError as error:
            if verbose:
                console.note(f"records are carried to count them: {error}")
            return program
        if verbose:
            console.note("handlers count what records would hold; none is carried")
        return self._at_hits.program

    def collect(self, session: ControlledSession, word_size: Literal[4, 8]) -> None:
        """Take what handlers have counted of a program with words of so many bytes."""
        if self._at_hits is not None and self._aggregates is not None:
            self._at_hits.collect(session, self._aggregates, word_size)

    def shown(self, program: Program, session: ControlledSession) -> AbstractContextManager[None]:
        """Return the context in which the live table is drawn, if it was asked for."""
        return nullcontext() if self._top is None else self._top.shown(program, session)

    def print(self) -> None:
        """Print what was counted, if anything was to be."""
        if self._aggregates is not None:
            from dprobes.cli.output.aggregation import print_aggregates

            print_aggregates(self._aggregates)
        if self._stacks is not None and self._stacks_options is not None:
            from dprobes.cli.output.stackprofiles import write_profile

            write_profile(self._stacks, self._stacks_options)
