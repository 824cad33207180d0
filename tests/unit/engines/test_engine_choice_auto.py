"""Which engine ``auto`` takes, and what it says."""

from __future__ import annotations

import pytest

from dprobes.engines.engine_capabilities import Capability, Requirement
from dprobes.engines.engine_choice import Choice, choose
from dprobes.engines.engine_interface import Scope
from dprobes.engines.engine_registry import EngineRow, KernelSupport

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
