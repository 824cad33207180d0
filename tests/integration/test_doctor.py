"""What ``doctor`` finds out about tracing by trying it on a child of ours."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ptrace import ptrace_doctor
from dprobes.platform.linux import ptrace_calls

if TYPE_CHECKING:
    from dprobes.engines.engine_interface import Finding

IN_A_PAGE = "execute copies of probed instructions (a system call injected into the target)"
INLINE = "run handlers in the probed process, at the cost of a call (inline engine)"


def findings() -> dict[str, Finding]:
    return {finding.what: finding for finding in ptrace_doctor.examine()}


def test_pages_and_handlers_are_possible_here() -> None:
    found = findings()
    assert found[IN_A_PAGE].works
    assert found[INLINE].works


def test_a_process_that_may_have_no_more_files_has_no_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    seize = ptrace_calls.seize

    def limit_and_seize(pid: int) -> None:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0))
        seize(pid)

    monkeypatch.setattr(ptrace_calls, "seize", limit_and_seize)
    found = findings()
    assert found[IN_A_PAGE].works
    assert (found[INLINE].works, found[INLINE].detail) == (False, "too many open files")
    assert found[INLINE].remedy == (
        "allow processes to be sent files and to map executable memory; until then all hits are breakpoints"
    )


@pytest.mark.parametrize(
    ("injectable", "detail"), [("Seccomp", "a seccomp filter is in force"), ("", "threads have shadow stacks")]
)
def test_a_process_that_makes_no_calls_for_us_has_neither(
    monkeypatch: pytest.MonkeyPatch, injectable: str, detail: str
) -> None:
    monkeypatch.setattr(ptrace_doctor, "may_inject", lambda _: False)
    monkeypatch.setattr(ptrace_doctor, "process_field", lambda _, name: "2" if name == injectable else "0")
    found = findings()
    for what in (IN_A_PAGE, INLINE):
        assert (found[what].works, found[what].detail) == (False, detail)
