"""What a handler ends with besides its hit: ``exit 1`` and ``exit 3``, which concern the whole process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.hits.probes import CORE_DUMP, HANDING_OVER
from dprobes.engines.linux import ptracecalls
from dprobes.engines.ptrace.tracer.processes import Leaving
from dprobes.engines.ptrace.wire import Warned

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.engines.ptrace.tracer.connection import Connection
    from dprobes.engines.ptrace.tracer.coredump import CoreDumps
    from dprobes.engines.ptrace.tracer.handover import HandOver
    from dprobes.engines.ptrace.tracer.processes import Thread
    from dprobes.engines.ptrace.tracer.programs import Handled

__all__ = ["Exits"]


class Exits:
    """Note what handlers want, and carry it out when the hit has been seen to."""

    def __init__(self, connection: Connection, hand_over: HandOver, dumps: CoreDumps) -> None:
        self._connection = connection
        self._hand_over = hand_over
        self._dumps = dumps
        self._registers = ptracecalls.Registers()

    def note(self, thread: Thread, handled: Iterable[Handled]) -> None:
        """Note what is to become of a thread's process; of several handlers that say so the first one decides."""
        for probe, outcome, _, _ in handled:
            if outcome is None or outcome.exit_code not in HANDING_OVER:
                continue
            if thread.leaving is None:
                thread.leaving = Leaving(outcome.exit_code, probe.program)
                continue
            text = f"'exit {outcome.exit_code}' was not carried out in process {thread.pid}: another handler"
            text += f" ended with 'exit {thread.leaving.code}' at the same moment"
            self._connection.send(Warned(text, program=probe.program.number))

    def carry_out(self, thread: Thread) -> bool:
        """Begin with what was noted for the process of a stopped thread; return False if the thread is to go on."""
        leaving, thread.leaving = thread.leaving, None
        assert leaving is not None
        if leaving.code == CORE_DUMP:
            return self._dumps.start(thread, leaving.program)
        ptracecalls.get_registers(thread.tid, self._registers)
        return self._hand_over(thread, leaving.program, self._registers)
