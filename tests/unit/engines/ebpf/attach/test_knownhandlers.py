"""The code of handlers that is kept is what lowering makes, whoever we are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.lower import Filter, Request, lower
from dprobes.diagnostics import Diagnostics
from dprobes.engines.ebpf.attach import knownhandlers
from dprobes.engines.ebpf.attach.knownhandlers import lowered_handler
from dprobes.resolve.knownanswers import KnownAnswers
from dprobes.resolve.resolution import resolve
from dprobes.rpn.pipeline import parse_source
from dprobes.rpn.point import Point
from dprobes.source import SourceFile
from dprobes.target.location import Module

if TYPE_CHECKING:
    from dprobes.bpf.lower.request import Lowered
    from dprobes.resolve.probepoints import ResolvedCode, ResolvedModule

NOBODY = 0x7FFF_FFF1
HANDLER = f"push {NOBODY:#x}; push {NOBODY + 1:#x}; add; log 1; exit"
"""With numbers that stand for nobody's process id in code that is kept."""


@pytest.fixture(scope="module")
def resolved() -> ResolvedModule:
    module = Module.load(Path("/proc/self/exe").resolve())
    offset = module.elf.file_offset(module.elf.entry)
    source = SourceFile("test.rpn", f'name = "{module.path}"\noffset = {offset:#x}\n{HANDLER}\n')
    diagnostics = Diagnostics()
    return resolve(parse_source(source, diagnostics), module, diagnostics)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Return a list of what is lowered."""
    requests: list[Request] = []
    usual = knownhandlers._lower

    def counted(resolved: ResolvedCode, number: int, point: Point, request: Request) -> Lowered:
        requests.append(request)
        return usual(resolved, number, point, request)

    monkeypatch.setattr(knownhandlers, "_lower", counted)
    return requests


def test_each_process_gets_the_code_that_leaves_it_out(resolved: ResolvedModule, count: list[Request]) -> None:
    keeping = replace(resolved, answers=KnownAnswers())
    for pid in (1, 4321, 1 << 22):
        request = Request(filter=Filter(excluded=pid))
        direct = lower(resolved.image, resolved.architecture, resolved.image.handlers[0], Point(), request)
        assert lowered_handler(keeping, 0, Point(), request) == direct
    assert [request.filter.excluded for request in count] == [NOBODY, NOBODY + 1]


def test_code_for_a_process_tree_is_lowered_once(resolved: ResolvedModule, count: list[Request]) -> None:
    keeping = replace(resolved, answers=KnownAnswers())
    request = Request(filter=Filter(processes=True))
    first = lowered_handler(keeping, 0, Point(), request)
    assert lowered_handler(keeping, 0, Point(), request) is first
    assert count == [request]


def test_another_request_is_lowered_for(resolved: ResolvedModule, count: list[Request]) -> None:
    keeping = replace(resolved, answers=KnownAnswers())
    requests = [Request(filter=Filter(processes=True)), Request(filter=Filter(processes=True), wants_tid=True)]
    one, other = (lowered_handler(keeping, 0, Point(), request) for request in requests)
    assert one != other
    assert count == requests


def test_what_is_not_kept_is_lowered_each_time(resolved: ResolvedModule, count: list[Request]) -> None:
    request = Request(filter=Filter(excluded=7))
    assert lowered_handler(resolved, 0, Point(), request) == lowered_handler(resolved, 0, Point(), request)
    assert count == [request, request]
