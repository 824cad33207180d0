"""
State machine of a hit at an instruction that the engine emulates or single-steps.

A thread has at most one such hit. The hit begins when the thread arrives at the instruction. It ends (``NONE``) when
the instruction completes, or when something else, such as a signal, prevents that::

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

Handlers run at ``ARRIVED``; after ``UNFINISHED``, those that have run before do not run again. A hit is counted, and
its records are emitted, at ``COMPLETED``, ``FAULTED`` and ``COUNTED_EARLY``, unless the state is ``COUNTED`` or
``REPEATED``: in these states the hit has been counted before.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from dprobes.rpn.rpn_program import AccessCheck

__all__ = ["AFTER", "HitEvent", "HitState", "IllegalTransitionError", "ProbeLimits"]


class ProbeLimits(NamedTuple):
    """
    Limits of a probe definition: which hits run its handler, and whether a hit that faults has a record.

    ``maxhits`` 0: no limit. With ``keep_on_fault``, hits count even if the instruction faults. With ``keep_ip``,
    records contain the instruction pointer even if the user did not request it. ``access`` is a condition on the memory
    that the instruction accesses; None: there is none.
    """

    passcount: int
    maxhits: int
    keep_on_fault: bool
    keep_ip: bool
    access: AccessCheck | None = None


class HitState(enum.IntEnum):
    """State of the hit of a thread, from its arrival at the breakpoint until it was counted."""

    NONE = 0
    """There is no hit."""
    HANDLED = 1
    """The handlers run, or have run, and the instruction is about to be executed."""
    PENDING = 2
    """The thread continues with the instruction and does not stop after it, so the outcome is not known yet."""
    UNFINISHED = 3
    """The handlers have run, but the instruction has not been executed. The thread will arrive there again."""
    COUNTED = 4
    """The hit has been counted, but the instruction has not been executed, as far as is known."""
    REPEATED = 5
    """The thread is at the instruction again, and the hit has been counted."""


class HitEvent(enum.IntEnum):
    """Event that changes the state of a thread's hit (``AFTER``)."""

    ARRIVED = 0
    """The thread has arrived at the instruction."""
    CAME_BACK = 1
    """The thread has arrived again because an interrupted instruction, such as a system call, is repeated."""
    COMPLETED = 2
    """The instruction has been executed, or the hit counts regardless of the outcome."""
    FAULTED = 3
    """The instruction has raised a signal."""
    LET_RUN = 4
    """The thread continues with the instruction. The outcome is found later."""
    INTERRUPTED = 5
    """A signal or another event is handled before the instruction, which follows later."""
    COUNTED_EARLY = 6
    """The hit is counted although the instruction has not been executed."""
    GIVEN_UP = 7
    """A signal or another event is handled before the instruction. The thread may not return to it."""
    KEPT = 8
    """One program gave up the hit, and the thread is at the instruction again. Other programs' results are kept."""


class IllegalTransitionError(Exception):
    """Error that an engine reported an event that cannot occur in the hit's state."""

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
"""Next state, by state and event. Any other pair raises ``IllegalTransitionError``."""
