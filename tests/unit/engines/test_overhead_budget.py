"""What users say of the overhead, and what holds where they say nothing."""

from __future__ import annotations

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.engines.engine_interface import Scope
from dprobes.engines.overhead_budget import DEFAULT_OVERHEAD, UNLIMITED, budget_of, check_overhead, overhead_of
from dprobes.errors import EngineError
from dprobes.rpn.compilation_passes import parse_source
from dprobes.source_text import SourceFile


@pytest.mark.parametrize(
    ("text", "percent"),
    [("10%", 10), ("10", 10), (" 10 % ", 10), ("0.5%", 0.5), ("100", 100), ("off", UNLIMITED), ("none", UNLIMITED)],
)
def test_a_percentage_or_a_word(text: str, percent: float) -> None:
    assert overhead_of(text) == percent


@pytest.mark.parametrize("text", ["", "much", "-1", "101%", "1e1", "10%%", "0x10", "1/2"])
def test_anything_else_is_an_error(text: str) -> None:
    with pytest.raises(EngineError) as caught:
        overhead_of(text)
    assert caught.value.message == f"an overhead is more than 0 and at most 100 percent of a CPU, not '{text}'"
    assert caught.value.hint == "write it as 10% or 10; 'off' is for no limit"


def test_so_is_a_number_that_is_none() -> None:
    with pytest.raises(EngineError, match="not '250'"):
        check_overhead(250)
    with pytest.raises(EngineError, match="not '-1'"):
        check_overhead(-1)
    assert check_overhead(0) == UNLIMITED


DEFAULT = DEFAULT_OVERHEAD / 100


@pytest.mark.parametrize(
    ("header", "scope", "budget"),
    [
        ("name = libc", Scope(), DEFAULT),
        ("name = libc", Scope(pid=1), None),
        ("name = libc", Scope(command=("ls",)), None),
        ("name = libc", Scope(cgroup="/sys/fs/cgroup"), None),
        ("name = libc", Scope(uid=0), None),
        ("name = vmlinux\nmodtype = kernel", Scope(), DEFAULT),
        ("name = vmlinux\nmodtype = kernel", Scope(pid=1), DEFAULT),
    ],
)
def test_all_processes_and_the_kernel_have_a_limit_by_default(header: str, scope: Scope, budget: float | None) -> None:
    program = parse_source(SourceFile("x.rpn", f"{header}\noffset = f\nexit\n"), Diagnostics())
    assert budget_of(None, scope, program) == budget
    assert budget_of(40.0, scope, program) == 0.4
    assert budget_of(UNLIMITED, scope, program) is None
