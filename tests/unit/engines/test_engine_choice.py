"""Which engine ``auto`` takes, and what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.engines.ebpf import ebpf_engine as ebpf
from dprobes.engines.ebpf.attach.code_mappers import Mapper
from dprobes.engines.engine_capabilities import Capability, Requirement
from dprobes.engines.engine_choice import Choice, Selection, choose
from dprobes.engines.engine_choice import obstacle as obstacle_to
from dprobes.engines.engine_interface import EngineOptions, Job, Scope
from dprobes.engines.engine_registry import EngineRow, KernelSupport, engine_row
from dprobes.resolve.local_module import ResolvedProgram, resolve_here
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.source_text import SourceFile
from support.ebpf_backend import obstacle

if TYPE_CHECKING:
    from pathlib import Path

TREE = Scope(pid=1)
ALL = Scope()


def need(capability: Capability, what: str = "push r, ds") -> Requirement:
    return Requirement(capability, what, None)


def works(*capabilities: Capability) -> KernelSupport:
    return KernelSupport(capabilities=frozenset(capabilities))


def never_asked(row: EngineRow) -> KernelSupport:
    raise AssertionError("the kernel need not be asked")


def test_where_both_can_the_kernel_runs_the_handlers() -> None:
    expected = Choice("ebpf", "handlers run in the kernel, and nothing in the program needs ptrace")
    assert choose(TREE, [], lambda _: works()) == expected
    assert choose(Scope(command=("ls",)), [need(Capability.GLOB)], lambda _: works()) == expected


@pytest.mark.parametrize("scope", [ALL, Scope(uid=0), Scope(cgroup="/sys/fs/cgroup/x")])
def test_other_scopes_than_a_tree_are_for_the_kernel(scope: Scope) -> None:
    expected = Choice("ebpf", "only it probes processes that it did not start or attach to")
    assert choose(scope, [need(Capability.SEGMENT_REGISTER)], never_asked) == expected


def test_what_only_ptrace_can_is_named() -> None:
    reason = "'push r, ds' needs the segment registers other than cs and ss, which the ebpf engine lacks"
    assert choose(TREE, [need(Capability.SEGMENT_REGISTER)], never_asked) == Choice("ptrace", reason)


def test_an_obstacle_on_this_machine_is_named() -> None:
    row = engine_row("ebpf")
    assert obstacle_to(row, [need(Capability.GLOB)], works()) is None
    module = Requirement(Capability.KERNEL_MODULE, "modtype = kernel", None, "this kernel has no kprobes")
    assert obstacle_to(row, [module], works(Capability.KERNEL_MODULE)) is None
    assert obstacle_to(row, [module], works()) == (
        "'modtype = kernel' needs probes in the kernel or a kernel module; this kernel has no kprobes"
    )
    assert obstacle_to(row, [need(Capability.SEGMENT_REGISTER)], works()) == (
        "'push r, ds' needs the segment registers other than cs and ss"
    )
    assert obstacle_to(row, [], KernelSupport("it is closed", "open it")) == "it is closed; open it"


def test_what_some_kernels_allow_is_asked_for() -> None:
    needs = [need(Capability.WRITE_MEMORY, "pop mem, u8")]
    assert choose(TREE, needs, lambda _: works(Capability.WRITE_MEMORY)).engine == "ebpf"
    reason = "'pop mem, u8' needs writing memory, which the ebpf engine lacks"
    assert choose(TREE, needs, lambda _: works()) == Choice("ptrace", reason)


def test_what_only_the_kernel_can_is_named() -> None:
    reason = "'push task' needs the kernel's task structure, which the ptrace engine lacks"
    assert choose(TREE, [need(Capability.TASK, "push task")], never_asked) == Choice("ebpf", reason)


def test_a_kernel_that_does_not_allow_it_leaves_ptrace() -> None:
    reason = "the ebpf engine cannot work here: this user lacks CAP_BPF"
    assert choose(TREE, [], lambda _: KernelSupport("this user lacks CAP_BPF")) == Choice("ptrace", reason)


def test_a_kernel_without_types_cannot_follow_a_tree() -> None:
    support = KernelSupport(tree_problem="this kernel shows no types")
    reason = "the ebpf engine cannot follow processes here: this kernel shows no types"
    assert choose(TREE, [], lambda _: support) == Choice("ptrace", reason)
    assert choose(ALL, [], lambda _: support).engine == "ebpf"


def test_a_debugger_gets_the_instruction_that_was_not_executed() -> None:
    reason = "'exit 1' leaves the probed instruction to the debugger only there"
    assert choose(TREE, [need(Capability.HAND_OVER, "exit 1")], never_asked) == Choice("ptrace", reason)


def test_a_process_that_is_traced_already_is_for_the_kernel() -> None:
    reason = "the process is traced by process 7 (gdb) already"
    assert choose(TREE, [], never_asked, traced_by="process 7 (gdb)") == Choice("ebpf", reason)


# ``auto`` leaves a command to a tracer where its breakpoints would be in too many other processes.


LIBRARY = "libc.so.6"


def settled(
    monkeypatch: pytest.MonkeyPatch, name: str, scope: Scope, mappers: int, *, replaceable: bool = False
) -> tuple[str, str | None]:
    """Return the engine for all functions of the C library that begin with 'm', and why."""
    if (reason := obstacle()) is not None:
        pytest.skip(reason)

    def found(path: Path, *_: object) -> list[Mapper]:
        return [Mapper(1, 1, (), "")] * mappers

    monkeypatch.setattr("dprobes.engines.ebpf.attach.code_mappers.find_mappers", found)
    monkeypatch.setattr(ebpf, "MANY_PLACES", 20)
    monkeypatch.setattr(ebpf, "MANY_BREAKPOINTS", 2000)
    diagnostics = Diagnostics()
    source = SourceFile("x.rpn", f'name = "{LIBRARY}"\noffset = m*\nexit\n')
    program = parse_source(source, diagnostics, CompileOptions())
    select = Selection(name, scope, EngineOptions(replaceable=replaceable))
    compiled: ResolvedProgram = resolve_here(program, diagnostics, choose_engine=select.choose)
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
