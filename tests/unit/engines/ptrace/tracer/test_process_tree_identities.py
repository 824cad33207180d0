"""The tracer tells who threads are that have handlers in their memory, and of no others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dprobes.engines.ptrace.site_patches import NativeMemory
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.process_tree import Identities
from dprobes.engines.ptrace.tracer.tracer_state import Thread, ThreadState
from dprobes.platform.linux.procfs import identity_of, program_of

PID = os.getpid()


def told(*, has_handlers: bool) -> list[Any]:
    messages: list[Any] = []
    space = AddressSpace.closed(8)
    if has_handlers:
        space.patches.memories[0] = NativeMemory(0, 0, 0, 0)
    identities = Identities(messages.append)
    identities.born(PID, space)
    identities.ended(Thread(PID, PID, space, ThreadState.STOPPED))
    return messages


def test_of_threads_with_handlers_is_told_who_they_are() -> None:
    born, ended = told(has_handlers=True)
    assert born.name == Path("/proc/self/comm").read_bytes().rstrip(b"\n")
    assert born.program == program_of(PID)
    assert ended == identity_of(PID, PID)


def test_of_others_nothing_is_told() -> None:
    assert told(has_handlers=False) == []
