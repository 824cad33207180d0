"""The rows of the registry, and what users may ask for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dprobes
from dprobes.engines.ebpf.ebpf_options import RING_SIZE, EbpfOptions
from dprobes.engines.engine_capabilities import Capability
from dprobes.engines.engine_choice import scope_problem
from dprobes.engines.engine_interface import Engine, EngineOptions, MachineKnowledge, Scope, ScopeKind
from dprobes.engines.engine_registry import (
    AUTO,
    EngineRow,
    candidates,
    engine_row,
    faster_row,
    fastest_engine,
    named_engine,
    names,
    rows,
)
from dprobes.errors import EngineError

ROWS = pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
TREE = Scope(pid=1)
SCOPES = [Scope(), TREE, Scope(cgroup="/c"), Scope(uid=0), Scope(endpoint="x"), Scope(machine="m"), Scope(kernel=True)]


@ROWS
def test_what_a_row_names_is_there(row: EngineRow) -> None:
    scope = next(scope for scope in SCOPES if scope.kind in row.scopes)
    engine = row.make(EngineOptions(), scope)
    assert isinstance(engine, Engine)
    assert engine.name == row.name
    assert row.name in row.factory.split(".")
    for path in (
        row.options,
        row.doctor,
        row.place_notes,
        row.code_listing,
        row.candidacy and row.candidacy.support,
        row.speedup and row.speedup.obstacle,
    ):
        if path:
            module, _, name = path.partition(":")
            assert callable(getattr(__import__(module, fromlist=[name]), name))


def test_a_scope_has_one_kind() -> None:
    assert [scope.kind for scope in SCOPES] == list(ScopeKind)


def test_every_scope_of_a_kind_that_no_engine_takes_is_refused() -> None:
    refused = {
        (name, scope.kind): scope_problem(name, scope, EngineOptions())
        for name in (AUTO, *(row.name for row in rows()))
        for scope in SCOPES
    }
    assert {kind for (name, kind), problem in refused.items() if name == AUTO and problem is None} == {
        ScopeKind.EVERYWHERE,
        ScopeKind.TREE,
        ScopeKind.CGROUP,
        ScopeKind.USER,
    }
    assert refused[AUTO, ScopeKind.ENDPOINT] == (
        "no engine that auto chooses from can probe the target of a stub, or recorded hits; use --engine replay=FILE"
    )
    assert refused[AUTO, ScopeKind.KERNEL] == (
        "no engine that auto chooses from can probe the kernel; none of this version can"
    )
    assert refused["ebpf", ScopeKind.MACHINE] == (
        "the ebpf engine cannot probe a virtual machine; none of this version can"
    )
    assert refused["ebpf", ScopeKind.ENDPOINT] == (
        "the ebpf engine cannot probe the target of a stub, or recorded hits; --engine replay=FILE can"
    )
    assert refused["ptrace", ScopeKind.USER] == (
        "the ptrace engine needs a command (-c COMMAND) or a process (-p PID); other scopes need --engine ebpf"
    )
    assert refused["replay", ScopeKind.TREE] == (
        "the replay engine probes what --engine replay=FILE names, not a command or process"
    )


def test_what_an_engine_cannot_ignore_is_refused() -> None:
    options = EngineOptions(own={"pid_namespace": True, "exact": True})
    assert scope_problem("ptrace", TREE, options) == "--pid-namespace needs --engine ebpf"
    assert scope_problem("ebpf", TREE, options) is None
    assert scope_problem(AUTO, TREE, options) is None
    assert scope_problem("ptrace", TREE, EngineOptions(own={"exact": True})) is None


def test_users_ask_by_names_with_arguments() -> None:
    assert names() == ("auto", "ebpf", "gdb=ENDPOINT", "inline", "ptrace", "replay=FILE")
    assert named_engine("auto") == ("auto", None)
    assert named_engine("replay=a=b") == ("replay", "a=b")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("gbd", "there is no engine 'gbd'", "engines are auto, ebpf, gdb=ENDPOINT, inline, ptrace, replay=FILE"),
        ("", "there is no engine ''", "engines are auto, ebpf, gdb=ENDPOINT, inline, ptrace, replay=FILE"),
        ("auto=x", "there is no engine 'auto'", "engines are auto, ebpf, gdb=ENDPOINT, inline, ptrace, replay=FILE"),
        ("ptrace=1", "the ptrace engine takes no argument: 'ptrace=1'", "write --engine ptrace"),
        ("replay", "the replay engine needs an argument", "write --engine replay=FILE"),
        ("replay=", "the replay engine needs an argument", "write --engine replay=FILE"),
    ],
)
def test_other_names_are_errors(text: str, message: str, hint: str) -> None:
    with pytest.raises(EngineError) as caught:
        named_engine(text)
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_auto_weighs_the_cheapest_first() -> None:
    assert [row.name for row in candidates()] == ["ebpf", "ptrace"]


def test_options_of_an_engine_are_its_own() -> None:
    row = engine_row("ebpf")
    assert row.own_options({}) == EbpfOptions(ring_size=RING_SIZE)
    assert RING_SIZE == 16 << 20
    assert row.own_options({"exact": True, "of_another": 1}) == EbpfOptions(exact=True)


def test_knowledge_is_kept() -> None:
    knowledge = MachineKnowledge()
    first = knowledge.recall(list)
    assert knowledge.recall(list) is first
    assert MachineKnowledge().recall(list) is not first


def test_nobody_else_names_an_engine() -> None:
    """Names stand in the registry, and in the package of the engine; no other code compares or lists them."""
    source = Path(dprobes.__file__).parent
    named = re.compile("[\"'](" + "|".join(row.name for row in rows()) + ")[\"']")
    packages = [source / "engines" / row.name for row in rows()]
    found = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if not any(package in path.parents for package in packages) and named.search(path.read_text())
    }
    keyword = {  # 'inline' in DProbes C
        "cli/languageserver/editor_completion.py",
        "dpc/syntax/program_parser.py",
        "dpc/syntax/syntax_tree.py",
    }
    debugger = {"cli/runs/run_execution.py"}  # the command 'gdb'
    promised = {"sets/set_description.py"}  # engines that the description of a set may name, without knowing them
    assert found == {"engines/engine_registry.py"} | keyword | debugger | promised


def test_an_engine_that_is_faster_does_all_that_the_other_one_does() -> None:
    assert [(row.name, faster.name) for row in rows() if (faster := faster_row(row.name)) is not None] == [
        ("ptrace", "inline")
    ]
    assert fastest_engine() == "inline"
    for row in rows():
        if (faster := faster_row(row.name)) is not None:
            # A patch has no hits that could be faster.
            capabilities = row.capabilities - {Capability.LIVE_PATCH}
            assert (faster.scopes, faster.capabilities) == (row.scopes, capabilities)
            assert faster.is_tracer == row.is_tracer
            assert faster not in candidates()


def test_only_the_gdb_engine_knows_of_kernels_elsewhere() -> None:
    scope = Scope(endpoint="/no/stub")
    assert engine_row("ebpf").kernel_types_of(scope) is None
    assert engine_row("gdb").kernel_types_of(Scope()) is None
    types = engine_row("gdb").kernel_types_of(scope)
    assert types is not None
    with pytest.raises(EngineError) as caught:
        types()
    assert caught.value.message == "there is no stub at /no/stub: no such file or directory"
