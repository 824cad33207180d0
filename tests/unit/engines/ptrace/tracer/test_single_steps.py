"""Memory for copies of instructions that cannot be mapped is withdrawn from the restorers."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.engines.ptrace.tracer import single_steps
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.call_injection import InjectionError
from dprobes.engines.ptrace.tracer.single_steps import map_code
from dprobes.engines.ptrace.tracer.tracer_state import Thread, ThreadState
from dprobes.engines.ptrace.tracer_messages import PagesMapped, PagesUnmapped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

START, SIZE = 0x5000, 0x1000
MAPPED, UNMAPPED = PagesMapped(7, ((START, START + SIZE),)), PagesUnmapped(7, ((START, START + SIZE),))


def refuse(*_: int) -> int:
    raise InjectionError


@pytest.mark.parametrize(
    ("call", "result", "messages"),
    [
        (lambda *_: START, START, [MAPPED]),
        (lambda *_: -12, 0, [MAPPED, UNMAPPED]),
        (lambda *_: START + SIZE, 0, [MAPPED, UNMAPPED]),
        (refuse, 0, [MAPPED]),
        (None, 0, [MAPPED, UNMAPPED]),
    ],
    ids=["mapped", "no memory", "elsewhere", "no return", "no call"],
)
def test_pages_are_withdrawn_unless_they_may_be_mapped(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., int] | None, result: int, messages: list[object]
) -> None:
    @contextlib.contextmanager
    def injecting(_: Thread) -> Iterator[Callable[..., int]]:
        if call is None:
            raise InjectionError
        yield call

    monkeypatch.setattr(single_steps, "gap_near", lambda *_: START)
    monkeypatch.setattr(single_steps, "injecting", injecting)
    space = AddressSpace.closed(8)
    space.pids.add(7)
    sent: list[object] = []
    connection: Any = SimpleNamespace(send=sent.append)
    assert map_code(connection, Thread(7, 7, space, ThreadState.STOPPED), 0x9000, SIZE) == result
    assert sent == messages
