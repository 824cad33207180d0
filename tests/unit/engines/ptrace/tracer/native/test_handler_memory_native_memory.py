"""What a process maps for code is noted page by page: nothing of its own may be unmapped at the end."""

from __future__ import annotations

import contextlib
import errno
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.engines.ptrace.site_patches import Patches
from dprobes.engines.ptrace.tracer.call_injection import MUNMAP, OccupiedError
from dprobes.engines.ptrace.tracer.native import handler_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGES = ((0x10000, 0x11000), (0x20000, 0x22000), (0x30000, 0x31000))


def thread_that_answers(monkeypatch: pytest.MonkeyPatch, answer: Callable[..., int]) -> tuple[Any, list[int]]:
    """Return a thread whose mmap(2) answers so, and the addresses that it was made to unmap."""
    unmapped: list[int] = []

    def call(number: int, first: int, *rest: int) -> int:
        if number == MUNMAP[8]:
            unmapped.append(first)
            return 0
        return answer(first)

    @contextlib.contextmanager
    def injecting(_: object) -> Iterator[Callable[..., int]]:
        yield call

    monkeypatch.setattr(handler_memory, "injecting", injecting)
    return SimpleNamespace(space=SimpleNamespace(patches=Patches())), unmapped


def test_all_that_was_mapped_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, unmapped = thread_that_answers(monkeypatch, lambda start: start)
    handler_memory.map_code(thread, 3, PAGES)
    assert thread.space.patches.code == {3: list(PAGES)}
    assert not unmapped


def test_what_the_process_has_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, unmapped = thread_that_answers(monkeypatch, lambda start: -errno.EEXIST if start == 0x20000 else start)
    with pytest.raises(OccupiedError, match="something else is mapped at 0x20000"):
        handler_memory.map_code(thread, 3, PAGES)
    assert thread.space.patches.code == {3: [PAGES[0]]}
    assert not unmapped


def test_what_comes_elsewhere_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, unmapped = thread_that_answers(monkeypatch, lambda start: 0x70000 if start == 0x20000 else start)
    with pytest.raises(OccupiedError, match="something else is mapped at 0x20000"):
        handler_memory.map_code(thread, 3, PAGES)
    assert thread.space.patches.code == {3: [PAGES[0]]}
    assert unmapped == [0x70000]
