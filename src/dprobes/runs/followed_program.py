"""
Attachment with a thread that reads its events, passes records on, and keeps the states of probepoints.

The thread calls ``take_records`` and ``take_end``. Any thread may call the other methods.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, assert_never

from dprobes.engines.engine_interface import Begun, Counts, Finished, Notice, Pause, RecordBatch, StateEvent, Stop
from dprobes.errors import DprobesError, InternalError
from dprobes.resolve.probepoints import NEVER_RETURNS, ProbeState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.engines.engine_interface import Attachment, Event
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint
    from dprobes.rpn.rpn_program import Program

__all__ = ["GONE", "FollowedProgram", "settled_counts"]

_NOTICES_MAX = 50
"""Maximum number of notices that are kept, the latest ones."""

GONE = (ProbeState.DISABLED, ProbeState.REMOVED)
"""States of probepoints that were inserted and are no longer."""

_BEGINNING = 20.0
"""Maximum seconds that an insertion waits until all processes in scope are probed."""

_END_PATIENCE = 20.0
"""Maximum seconds that an attachment may take to end."""

_LOOK = 0.005
"""Seconds between two checks whether records have been processed."""


class FollowedProgram(ABC):
    """
    Attached program whose events a thread reads from ``start`` on.

    Subclasses process the records.
    """

    def __init__(self, name: str, program: Program, attachment: Attachment) -> None:
        self.name = name
        self.program = program
        self.attachment = attachment
        self._states: dict[int, ProbeState] = {}
        self._details: dict[int, str] = {}
        self._notices: deque[Notice] = deque(maxlen=_NOTICES_MAX)
        self._finished: Finished | None = None
        self._problem: str | None = None
        self._lock = threading.Lock()
        self._begun = threading.Event()
        self._failure: DprobesError | None = None
        self._taken = 0
        """The number of records that were passed to ``take_records``."""
        self._pauses = 0
        """The number of times at which no record was waiting."""
        self._thread = threading.Thread(target=self._follow, name=f"program {name}", daemon=True)

    # The thread

    def start(self, patience: float = _BEGINNING) -> None:
        """
        Start the thread; wait up to ``patience`` seconds until all processes in scope are probed.

        Raise the error if one has prevented the insertion.
        """
        self._thread.start()
        self._begun.wait(patience)
        if self._failure is not None:
            raise self._failure

    @abstractmethod
    def take_records(self, records: Sequence[tuple[int, bytes]]) -> None:
        """Process records, each with the number of its probepoint; called by the thread."""

    @abstractmethod
    def take_end(self, lost: int) -> None:
        """
        Handle the end of the records, ``lost`` of which were lost before they reached the thread.

        Called by the thread.
        """

    def _follow(self) -> None:
        try:
            for event in self.attachment.poll():
                self._on_event(event)
        except DprobesError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - it is reported, and must not affect other programs
            self._fail(InternalError(f"{type(error).__name__}: {error}"))
        finally:
            self._close()
            self._begun.set()

    def _fail(self, error: DprobesError) -> None:
        self._problem = f"internal error: {error.message}" if isinstance(error, InternalError) else error.message
        if not self._begun.is_set():
            self._failure = error

    def _on_event(self, event: Event) -> None:
        match event:
            case RecordBatch(records):
                self.take_records(records)
                self._taken += len(records)
            case Pause():
                self._pauses += 1
            case StateEvent():
                self._on_state(event)
            case Notice():
                with self._lock:
                    self._notices.append(event)
            case Finished():
                self._finished = event
            case Begun():
                self._begun.set()
            case _:
                assert_never(event)

    def _on_state(self, event: StateEvent) -> None:
        with self._lock:
            for probe in event.probes:
                known = self._states.get(probe)
                # An obstacle in one process does not end a probepoint in the others.
                if known in GONE or (known is ProbeState.ACTIVE and event.pid and event.state not in GONE):
                    continue
                self._states[probe] = event.state
                if event.detail:
                    where = f"in process {event.pid}: " if event.pid else ""
                    self._details[probe] = where + event.detail
                elif not event.pid:
                    self._details.pop(probe, None)

    def _close(self) -> None:
        try:
            self.attachment.close()
        except Exception as error:  # noqa: BLE001 - as above
            self._problem = self._problem or f"internal error: {type(error).__name__}: {error}"
        self.take_end(sum(count.lost for count in self._finished.counts) if self._finished is not None else 0)

    # Queries by other threads

    @property
    def has_ended(self) -> bool:
        """True if no probepoint of the program is inserted any more."""
        return not self._thread.is_alive()

    @property
    def problem(self) -> str | None:
        """The message of the error that has ended the run, or None if there was none."""
        return self._problem

    @property
    def finished(self) -> Finished | None:
        """The last event of the attachment, None before it."""
        return self._finished

    @property
    def probes(self) -> Sequence[Probepoint]:
        """The program's probepoints; later ones are appended, so the numbers of the others do not change."""
        return self.attachment.probes

    @property
    def left_out(self) -> Sequence[LeftOutProbe]:
        """The places that match a pattern and have no probepoint."""
        return self.attachment.left_out

    def states(self) -> list[tuple[ProbeState, str]]:
        """Return the state of each probepoint, and its details, which may be empty."""
        probes = self.probes
        ended = self.has_ended
        with self._lock:
            found = [
                (self._states.get(n, probe.state), self._details.get(n, NEVER_RETURNS if probe.never_returns else ""))
                for n, probe in enumerate(probes)
            ]
        if ended:
            gone = ProbeState.REMOVED
            found = [(gone if state is ProbeState.ACTIVE else state, detail) for state, detail in found]
        return found

    def counts(self) -> Sequence[Counts]:
        """Return the current counts of each probepoint, as ``seen`` presents them."""
        return self.seen(self.session_counts())

    def seen(self, counts: Sequence[Counts]) -> Sequence[Counts]:
        """
        Return the counts to report for the ``counts`` of the attachment.

        Both have an element for each probepoint. A subclass may add later losses of records.
        """
        return counts

    def session_counts(self) -> Sequence[Counts]:
        """Return the counts of each probepoint as the engine reports them, in the order of ``probes``."""
        return self._finished.counts if self._finished is not None else self.attachment.counts()

    @property
    def taken(self) -> tuple[int, int]:
        """The number of processed records, and the number of pauses: times at which no record was waiting."""
        return self._taken, self._pauses

    def notices(self) -> list[Notice]:
        """Return the latest notices of the engine, the oldest first."""
        with self._lock:
            return list(self._notices)

    def probes_at(self, major: int, minor: int) -> list[int]:
        """
        Return the numbers of the probepoints whose definition has these codes.

        The list is empty if ``major`` is not the program's.
        """
        if major != self.program.major:
            return []
        return [n for n, probe in enumerate(self.probes) if probe.definition.minor == minor]

    def stop(self) -> None:
        """Request the end of the run without waiting."""
        self.attachment.change([Stop()])

    def wait(self, patience: float | None = _END_PATIENCE) -> bool:
        """
        Wait until no probepoint of the program is inserted any more.

        Return False if that takes more than ``patience`` seconds.
        """
        self._thread.join(patience)
        return self.has_ended


class _Settlement:
    """Counts of a program at one moment, until their records have been taken."""

    def __init__(self, program: FollowedProgram) -> None:
        self._program = program
        self._counts = program.session_counts()
        self._records = _records_of(self._counts)
        # Records that had arrived by now are taken before the second pause; the first one may be about to begin.
        self._pauses = program.taken[1] + 2

    def is_reached(self) -> bool:
        taken, pauses = self._program.taken
        if self._program.has_ended:
            self._counts = self._program.session_counts()
            self._records = taken
        elif taken < self._records and _records_of(now := self._program.session_counts()) < self._records:
            # Records of instructions that turned out to fault will not arrive.
            self._counts, self._records = now, _records_of(now)
        return self._program.has_ended or (taken >= self._records and pauses >= self._pauses)

    @property
    def result(self) -> tuple[Sequence[Counts], int]:
        return self._program.seen(self._counts), max(0, self._records - self._program.taken[0])


def settled_counts(programs: Sequence[FollowedProgram], until: float) -> list[tuple[Sequence[Counts], int]]:
    """
    Return the current counts of programs, each with the number of its records that have not been processed yet.

    Wait for these records, and for the state changes of probepoints until now. Give up at the time ``until``, in
    seconds of the monotonic clock.
    """
    settlements = [_Settlement(program) for program in programs]
    waiting = dict(zip(programs, settlements, strict=True))
    while waiting := {program: each for program, each in waiting.items() if not each.is_reached()}:
        if time.monotonic() > until:
            break
        for program in waiting:
            program.attachment.wake()
        time.sleep(_LOOK)
    return [each.result for each in settlements]


def _records_of(counts: Sequence[Counts]) -> int:
    return sum(each.records for each in counts)
