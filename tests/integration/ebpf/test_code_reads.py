"""A handler that reads the code at its place sees the breakpoint with eBPF, and its author is told; ptrace hides it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf, require_initial_namespace

if TYPE_CHECKING:
    from integration.support import Builder, Runner

WARNING = "warning: code that is read at a probepoint shows breakpoints (0xcc) with the ebpf engine"
READS = "push 1; push r, eip; log mrf"


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


@pytest.mark.parametrize(("engine", "byte"), [("ebpf", 0xCC), ("ptrace", 0x48)])
def test_what_is_read_there_is_as_it_was_said(build: Builder, run: Runner, engine: str, byte: int) -> None:
    source = f"name = jumps\noffset = at_load\nminor = 1\n{READS}\nexit\n"
    result = run.command(source, build("jumps.c"), 4, 1, options=("--engine", engine))
    assert {record["data"] for record in result.records} == {f"000100{byte:02x}"}
    assert (WARNING in result.stderr) == (engine == "ebpf")


@pytest.mark.parametrize("handler", ["push r, eip; log 1", "push 1; push r, esp; log mrf"])
def test_who_reads_no_code_is_told_nothing(build: Builder, run: Runner, handler: str) -> None:
    source = f"name = jumps\noffset = at_load\nminor = 1\n{handler}\nexit\n"
    result = run.command(source, build("jumps.c"), 4, 1, options=("--engine", "ebpf"))
    assert WARNING not in result.stderr


def test_the_place_of_a_return_has_no_breakpoint(build: Builder, run: Runner) -> None:
    source = f"name = jumps\noffset = do_load\nreturn = yes\nminor = 1\n{READS}\nexit\n"
    result = run.command(source, build("jumps.c"), 4, 1, options=("--engine", "ebpf"))
    assert WARNING not in result.stderr
