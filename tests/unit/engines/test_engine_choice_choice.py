"""``auto`` leaves a command to a tracer where its breakpoints would be in too many other processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.engines.ebpf import ebpf_engine as ebpf
from dprobes.engines.ebpf.attach.code_mappers import Mapper
from dprobes.engines.engine_choice import Selection
from dprobes.engines.engine_interface import Job, Scope
from dprobes.engines.engine_options import EngineOptions
from dprobes.resolve.local_module import Compiled, resolve_here
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.source_text import SourceFile
from support.ebpf_backend import obstacle

if TYPE_CHECKING:
    from pathlib import Path

LIBRARY = "libc.so.6"


@pytest.fixture(autouse=True)
def _kernel() -> None:
    if (reason := obstacle()) is not None:
        pytest.skip(reason)


def settled(
    monkeypatch: pytest.MonkeyPatch, name: str, scope: Scope, mappers: int, *, replaceable: bool = False
) -> tuple[str, str | None]:
    """Return the engine for all functions of the C library that begin with 'm', and why."""

    def found(path: Path, *_: object) -> list[Mapper]:
        return [Mapper(1, 1, (), "")] * mappers

    monkeypatch.setattr("dprobes.engines.ebpf.attach.code_mappers.find_mappers", found)
    monkeypatch.setattr(ebpf, "MANY_PLACES", 20)
    monkeypatch.setattr(ebpf, "MANY_BREAKPOINTS", 2000)
    diagnostics = Diagnostics()
    source = SourceFile("x.rpn", f'name = "{LIBRARY}"\noffset = m*\nexit\n')
    program = parse_source(source, diagnostics, CompileOptions())
    select = Selection(name, scope, EngineOptions(replaceable=replaceable))
    compiled: Compiled = resolve_here(program, diagnostics, refuse=select.refuse)
    assert compiled.resolved is not None
    assert 20 < len(compiled.resolved.in_code) < 2000
    return select.settle(Job(compiled, scope)).engine.name, select.reason


COMMAND = Scope(command=("ls",))


def test_a_command_whose_breakpoints_would_be_everywhere_is_for_a_tracer(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, reason = settled(monkeypatch, "auto", COMMAND, 100)
    assert engine == "inline"
    assert reason is not None
    assert " breakpoints would be in each of 100 other processes that map the module as well" in reason
    assert reason.endswith("; handlers run in the process")
    assert settled(monkeypatch, "auto", COMMAND, 100, replaceable=True)[0] == "ptrace"


@pytest.mark.parametrize(
    ("name", "scope", "mappers"),
    [("auto", COMMAND, 1), ("ebpf", COMMAND, 100), ("auto", Scope(), 100), ("auto", Scope(pid=1), 100)],
)
def test_others_are_for_the_kernel(monkeypatch: pytest.MonkeyPatch, name: str, scope: Scope, mappers: int) -> None:
    assert settled(monkeypatch, name, scope, mappers)[0] == "ebpf"
