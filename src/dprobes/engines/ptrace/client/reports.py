"""What the tracer reports, in the words and events of sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.interface import Notice, StateEvent
from dprobes.resolve.probestate import ProbeState

if TYPE_CHECKING:
    from dprobes.engines.ptrace.wire import Dumped, ProbeStatus

__all__ = ["death_notices", "dump_notice", "obstacle_text", "state_event"]


def state_event(message: ProbeStatus) -> StateEvent:
    """Return the event for the state of probepoints."""
    state = message.state
    detail = ""
    if state is ProbeState.CONFLICT:
        where = f"offset {message.offset:#x} of '{message.path}'"
        detail = f"a breakpoint of another tool is at {where}"
        if message.reason:
            detail = f"{where} cannot be written ({message.reason})"
    elif state is ProbeState.MISMATCH:
        detail = f"memory at offset {message.offset:#x} of '{message.path}' holds {message.found.hex(' ')}"
    elif message.reason:
        detail = message.reason
    return StateEvent(message.probes, message.pid, state, detail)


def obstacle_text(obstacle: ProbeStatus) -> str:
    """Say why a program cannot take the place of another one."""
    event = state_event(obstacle)
    return f"{event.state.value} in process {event.pid}: {event.detail}; the program before goes on"


def dump_notice(dumped: Dumped) -> Notice:
    """Say what became of a core file."""
    process = f"process {dumped.pid} ({dumped.name})"
    if dumped.problem:
        return Notice(f"no core of {process} in '{dumped.path}': {dumped.problem.rstrip()}; the process goes on")
    return Notice(f"the core of {process} is in '{dumped.path}' ({dumped.size} bytes)", is_warning=False)


def death_notices(status: int, restored: int, disarmed: int, armed: int) -> list[Notice]:
    """Say what was done when the tracer ended by itself with a status; see ``Bystander``."""
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    notices = [
        Notice(
            f"the tracer {how}; {restored} breakpoints were taken away from outside",
            "a thread that ran into one before that has got a SIGTRAP",
        )
    ]
    if disarmed:
        notices.append(Notice(f"the debug registers of {disarmed} threads were cleared from outside"))
    if armed:
        notices.append(
            Notice(
                f"the debug registers of {armed} threads could not be cleared: those threads do not stop",
                "an access that was watched will end the program with a SIGTRAP",
            )
        )
    return notices
