"""
What ``exit 1`` and ``exit 3`` have done with a process behind a stub: a debugger takes over, or its core is written.

Both happen before the probed instruction, while the process stands still, with the probepoint removed.
"""

from __future__ import annotations

import contextlib
import os
from abc import abstractmethod
from typing import TYPE_CHECKING

from dprobes.engines.core.corenotices import no_core_notice, written_notice
from dprobes.engines.gdb.controls import StubControls
from dprobes.engines.hits.probes import CORE_DUMP, HANDING_OVER
from dprobes.engines.interface import Pause
from dprobes.errors import reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.engines import interface
    from dprobes.engines.gdb.debuggerrelay import DebuggerRelay
    from dprobes.engines.gdb.process import StubProcess
    from dprobes.engines.gdb.processors import StubProcessor
    from dprobes.engines.gdb.program import Resolved, StubProgram
    from dprobes.engines.gdb.registers import Registers
    from dprobes.engines.gdb.stub import Stub
    from dprobes.engines.gdb.target import StubTarget
    from dprobes.engines.gdb.threadcontext import StubContext
    from dprobes.engines.hits.emission import Emitter
    from dprobes.engines.hits.handlerruns import Handled
    from dprobes.resolve.probepoints import Probepoint

__all__ = ["StubExits"]

_LOOK = 0.1
"""Seconds after which somebody's wish to end is seen at the latest."""


class StubExits(StubControls):
    """The part of a session by which a process is left to others."""

    probes: Sequence[Probepoint]
    _stub: Stub
    _target: StubTarget
    _context: StubContext
    _emitter: Emitter
    _process: StubProcess
    _processor: StubProcessor
    _resolved: Resolved
    _core_directory: str

    @abstractmethod
    def _count(self, handled: Sequence[Handled[StubProgram]]) -> None:
        """Count hits, and take out what has become inactive by that."""

    def _hand_over(self, handled: Sequence[Handled[StubProgram]], at: int, registers: Registers) -> bool:
        """Do what handlers want to be done with the target before it goes on; return whether the run is over then."""
        code = self._deciding_code(handled)
        if code is None or code == CORE_DUMP:
            return False
        where = next((self._shared.owner(each.probe).probes[each.probe.number].where for each in handled), "")
        self._count(handled)
        self._target.write_back(self._context.thread, registers)
        self._target.clear()
        relay = self._shared.relay = self._stub.relay()
        text = f"the process stands still at {at:#x} ({where}) until a debugger takes over, or the run is ended"
        self._warn(text, f"gdb {self._process.program} -ex 'target remote {relay.path}'")
        return True

    def _deciding_code(self, handled: Sequence[Handled[StubProgram]]) -> int | None:
        """Return how the first handler ended that hands the process over, None if none does; warn of the others."""
        codes = [each.outcome.exit_code for each in handled if each.outcome is not None]
        handing_over = [code for code in codes if code in HANDING_OVER]
        first = handing_over[0] if handing_over else None
        for code in handing_over[1:]:
            self._warn(
                f"'exit {code}' was not carried out in process {self._process.pid}: another handler ended with "
                f"'exit {first}' at the same moment",
                None,
            )
        return first

    def _leave_core(
        self, handled: Sequence[Handled[StubProgram]], at: int, registers: Registers
    ) -> Sequence[Handled[StubProgram]]:
        """Write the core of the process if a handler wants that; return the hits that are still to be counted."""
        if not any(each.outcome is not None and each.outcome.exit_code == CORE_DUMP for each in handled):
            return handled
        self._count(handled)
        self._target.write_back(self._context.thread, registers)
        self._events.append(self._write_core(at, registers))
        return ()

    def _write_core(self, at: int, registers: Registers) -> interface.Notice:
        from dprobes.engines.core.coreinput import create_core_file
        from dprobes.engines.gdb.cores.processcore import StubCore

        process = self._process
        name = os.fsdecode(process.name)
        path = os.path.join(self._core_directory, f"core.dprobes.{process.pid}")
        try:
            path, output = create_core_file(path)
        except OSError as error:
            return no_core_notice(process.pid, name, path, reason_of(error))
        core = StubCore(
            self._target,
            self._processor,
            self._resolved.architecture.name,
            process,
            self._context.thread,
            registers,
            at,
        )
        is_complete = False
        try:
            size = core.write(output)
            is_complete = True
        except OSError as error:
            return no_core_notice(process.pid, name, path, reason_of(error))
        finally:
            os.close(output)
            if not is_complete:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        return written_notice(process.pid, name, path, size)

    def _serve_debugger(self, relay: DebuggerRelay) -> Iterator[interface.Event]:
        """Pass on what a debugger says until the stub or the run comes to its end."""
        try:
            while not self._is_stopping:
                is_there = relay.serve(_LOOK)
                if relay.has_served or not is_there:
                    self._target.is_over = True  # what becomes of it is the debugger's business
                    self._target.tell("end")
                if not is_there:
                    break
                yield Pause()
        finally:
            relay.close()

    @property
    def is_debugging(self) -> bool:
        """Whether a debugger has taken the stub over, and is still there."""
        relay = self._shared.relay
        return relay is not None and relay.is_serving
