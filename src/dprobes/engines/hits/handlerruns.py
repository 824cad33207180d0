"""
Running the handlers of a hit: those of several programs in the order of their insertion, from one saved state.

Each handler sees the registers as they were at the hit, whatever others do with them. Their changes are put together
behind them: of two that change the same register, the later one counts. Memory is no part of the saved state, because
it belongs to all threads: what a handler writes there is done at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.ptrace.tracer.processes import Handled
from dprobes.vm import Ending

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterable, Sequence

    from dprobes.engines.ptrace.tracer.probes import Probe
    from dprobes.engines.ptrace.tracer.processes import Thread
    from dprobes.engines.ptrace.tracer.threadcontext import ThreadContext
    from dprobes.vm import Point

__all__ = ["HandlerRunner"]


class HandlerRunner:
    """Run handlers on the thread that ``context`` has selected."""

    def __init__(self, context: ThreadContext) -> None:
        self._context = context

    def run(
        self,
        thread: Thread,
        owners: Sequence[tuple[Probe, Point]],
        registers: ctypes.Array[ctypes.c_ulong],
        known: Iterable[Handled] = (),
    ) -> tuple[Handled, ...]:
        """
        Run the handlers of those probepoints whom a hit of the thread concerns; those that are ``known`` ran before.

        What they change in ``registers`` is there when all have run, and in ``written`` of the context.
        """
        if len(owners) == 1 and not known:  # nearly always
            probe, point = owners[0]
            return (self._run(thread, probe, point, registers),) if probe.concerns(thread) else ()
        context = self._context
        before = {handled.probe: handled for handled in known}
        context.set_aside()
        results = []
        for probe, point in owners:
            if probe.concerns(thread):
                handled = before.get(probe)
                if handled is None:
                    handled = self._run(thread, probe, point, registers)
                    context.set_aside()
                results.append(handled)
        for handled in results:
            if handled.changes:
                context.apply(handled.changes)
        return tuple(results)

    def _run(self, thread: Thread, probe: Probe, point: Point, registers: ctypes.Array[ctypes.c_ulong]) -> Handled:
        if not probe.runs_handler:
            return Handled(probe)
        program, context, word_size = probe.program, self._context, thread.space.word_size
        program.ledger.reset_if_asked()
        if context.program is not program:
            context.use(program)
        context.symbols = thread.space.symbols.get((program.number, probe.file), {})
        outcome = program.handlers[word_size].run(probe.definition, point, context)
        if outcome.ending is Ending.ABORT:
            return Handled(probe, outcome, None, context.written)
        header = program.records.header(context, registers, word_size, keep_ip=probe.limits.keep_ip)
        return Handled(probe, outcome, header, context.written)
