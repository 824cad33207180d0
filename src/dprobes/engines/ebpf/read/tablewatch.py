"""The watch on the tables that handlers write: what a run says besides records, now and then and at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.interface import Notice, StateEvent
from dprobes.resolve.probestate import ProbeState
from dprobes.rpn.isa import ExceptionCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.ebpf.attach.installation import Installation
    from dprobes.engines.ebpf.overload.overloadwatch import OverloadWatch
    from dprobes.engines.interface import Event
    from dprobes.rpn.program import Program

__all__ = ["TableWatch"]


class TableWatch:
    """The watch on the tables of one program in the kernel; each thing is reported once."""

    def __init__(self, program: Program, installed: Installation) -> None:
        self._program = program
        self._installed = installed
        self._unhandled: set[tuple[int, int]] = set()
        self._expired: set[int] = set()
        self.interval = 1.0
        """Seconds between two looks."""
        self._overload: OverloadWatch | None = None
        if installed.budget is not None:
            from dprobes.engines.ebpf.overload.overloadwatch import OverloadWatch
            from dprobes.engines.overload import LOOK_INTERVAL

            self.interval = LOOK_INTERVAL
            self._overload = OverloadWatch(program, installed, installed.budget)

    def look(self, *, is_quiet: bool) -> Iterator[Event]:
        """
        Iterate over what is new; to be called in intervals.

        ``is_quiet`` says that nothing waits to be read.
        """
        if self._overload is not None:
            yield from self._overload.look()
        yield from self._unhandled_exceptions()
        if is_quiet:
            yield from self._ended_unheard()

    def finish(self) -> Iterator[Event]:
        """Iterate over what is to be said at the end."""
        yield from self._unhandled_exceptions()
        yield from self._not_known()

    def _unhandled_exceptions(self) -> Iterator[Event]:
        """Say once for each definition which exceptions end its handlers."""
        program = self._program
        if program.autostacktrace:
            return
        for number, bits in self._installed.unhandled():
            definition = self._installed.probes[number].number
            for code in ExceptionCode:
                if bits & code and (definition, code) not in self._unhandled:
                    self._unhandled.add((definition, code))
                    yield Notice(
                        f"the handler of {program.major},{program.definitions[definition].minor} was ended by "
                        f"{code.name}, which nothing catches",
                        "catch it with 'sx', or see where it is raised with 'autostacktrace = yes'",
                    )

    def _ended_unheard(self) -> Iterator[Event]:
        """Take away what ended without our hearing of it, because the ring had no room for the entry."""
        # What has ended just now may still be on its way: only what had a second for that is lost.
        expired = self._installed.attachments.expired()
        for probe in expired & self._expired:
            self._installed.attachments.take_away(probe)
            yield StateEvent((probe,), 0, ProbeState.DISABLED)
            definition = self._installed.probes[probe].definition
            if any(i.row.syntax == "exit <code>" for i in definition.handler.instructions):
                yield Notice(
                    f"{self._program.major},{definition.minor} was removed, but the ring had no room to say why; if "
                    "its handler has stopped a process, that waits",
                    "find it with 'ps -e -o pid,stat,comm', state T; continue it with 'kill -CONT PID'",
                )
        self._expired = expired

    def _not_known(self) -> Iterator[Event]:
        """Say what the kernel had no room to tell."""
        maps = self._installed.maps
        if maps.unfollowed:
            yield Notice(
                f"{maps.unfollowed} processes of the tree were not probed: so many were alive that the scope was full",
                "probe all processes instead (without -c and -p), or those of a cgroup",
            )
        if maps.unseen:
            yield Notice(
                f"the ring had no room for {maps.unseen} faults: as many records may be of instructions that did not "
                "complete",
                "make the ring larger with --ring-size",
            )
