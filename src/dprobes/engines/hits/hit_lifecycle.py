"""
The life of a hit at an instruction that an engine carries out itself: states, events, and what follows on what.

A thread has at most one such hit, which begins when the thread arrives at the instruction and is over (``NONE``) when
the instruction was carried out, or is not carried out because something else comes first::

                    NONE        HANDLED     PENDING     UNFINISHED  COUNTED     REPEATED
    ARRIVED         HANDLED                             HANDLED
    CAME_BACK       REPEATED                                        REPEATED
    COMPLETED                   NONE        NONE        NONE        NONE        NONE
    FAULTED                     NONE        NONE                                NONE
    LET_RUN                     PENDING
    INTERRUPTED                 UNFINISHED                                      COUNTED
    COUNTED_EARLY               COUNTED                 COUNTED
    GIVEN_UP                    NONE        NONE        NONE        NONE        NONE
    KEPT            UNFINISHED

Handlers run when a thread has ``ARRIVED``, those that ran before the hit was left ``UNFINISHED`` not once more. Hits
are counted, and their records emitted, with ``COMPLETED``, ``FAULTED`` and ``COUNTED_EARLY``, unless the state is
``COUNTED`` or ``REPEATED``: then they were before.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

__all__ = ["AFTER", "HitEvent", "HitState", "IllegalTransitionError", "ProbeLimits"]


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """
    Limits of a probe definition: which hits run its handler, and which keep their record.

    With ``keep_ip`` its records contain the instruction pointer even if the user did not ask for it.
    """

    passcount: int
    maxhits: int
    keep_on_fault: bool
    keep_ip: bool


class HitState(enum.IntEnum):
    """State of a thread's hit."""

    NONE = 0
    """There is no hit."""
    HANDLED = 1
    """The handlers run, or have run, and the instruction is about to be carried out."""
    PENDING = 2
    """
    The thread executes the instruction, or has executed it, without a stop after it; the outcome is not known yet.
    """
    UNFINISHED = 3
    """The handlers have run, but the thread has not executed the instruction: it will arrive there again."""
    COUNTED = 4
    """The hit has been counted, but as far as is known the thread has not executed the instruction."""
    REPEATED = 5
    """The thread is at the instruction again, and the hit has been counted."""


class HitEvent(enum.IntEnum):
    """Event in the life of a hit."""

    ARRIVED = 0
    """The thread has arrived at the instruction."""
    CAME_BACK = 1
    """It has arrived there only because an interrupted operation, such as a system call, is repeated."""
    COMPLETED = 2
    """The instruction was carried out, or the hit counts regardless of the outcome."""
    FAULTED = 3
    """The instruction has raised a signal."""
    LET_RUN = 4
    """The thread continues from the instruction, and the outcome shows later."""
    INTERRUPTED = 5
    """Something else is handled first, and the instruction after that."""
    COUNTED_EARLY = 6
    """The hit is counted although the instruction has not been carried out."""
    GIVEN_UP = 7
    """Something else is handled first, and it is not known whether the thread returns."""
    KEPT = 8
    """
    The hit was given up for one program, and the thread set back; the results of other programs' handlers are kept.
    """


class IllegalTransitionError(Exception):
    """Error in an engine: an event that cannot happen in a state."""

    def __init__(self, state: HitState, event: HitEvent) -> None:
        super().__init__(f"a hit that is {HitState(state).name} cannot be {HitEvent(event).name}")


class _Transitions(dict[tuple[HitState, HitEvent], HitState]):
    def __missing__(self, key: tuple[HitState, HitEvent]) -> HitState:
        raise IllegalTransitionError(*key)


_S, _E = HitState, HitEvent

AFTER: Final = _Transitions(
    {
        (_S.NONE, _E.ARRIVED): _S.HANDLED,
        (_S.NONE, _E.CAME_BACK): _S.REPEATED,
        (_S.NONE, _E.KEPT): _S.UNFINISHED,
        (_S.HANDLED, _E.COMPLETED): _S.NONE,
        (_S.HANDLED, _E.FAULTED): _S.NONE,
        (_S.HANDLED, _E.LET_RUN): _S.PENDING,
        (_S.HANDLED, _E.INTERRUPTED): _S.UNFINISHED,
        (_S.HANDLED, _E.COUNTED_EARLY): _S.COUNTED,
        (_S.HANDLED, _E.GIVEN_UP): _S.NONE,
        (_S.PENDING, _E.COMPLETED): _S.NONE,
        (_S.PENDING, _E.FAULTED): _S.NONE,
        (_S.PENDING, _E.GIVEN_UP): _S.NONE,
        (_S.UNFINISHED, _E.ARRIVED): _S.HANDLED,
        (_S.UNFINISHED, _E.COMPLETED): _S.NONE,
        (_S.UNFINISHED, _E.COUNTED_EARLY): _S.COUNTED,
        (_S.UNFINISHED, _E.GIVEN_UP): _S.NONE,
        (_S.COUNTED, _E.CAME_BACK): _S.REPEATED,
        (_S.COUNTED, _E.COMPLETED): _S.NONE,
        (_S.COUNTED, _E.GIVEN_UP): _S.NONE,
        (_S.REPEATED, _E.COMPLETED): _S.NONE,
        (_S.REPEATED, _E.FAULTED): _S.NONE,
        (_S.REPEATED, _E.INTERRUPTED): _S.COUNTED,
        (_S.REPEATED, _E.GIVEN_UP): _S.NONE,
    }
)
"""Next state, by state and event; any other pair raises ``IllegalTransitionError``."""
