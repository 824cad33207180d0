"""A thread with something unexpected in its registers is served as any other, or let alone; all others go on."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from integration.support import await_line, await_true, code_is_original, read_result, running, tracer_of

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner

PLACES = ("site_move", "site_free", "site_load", "site_in_place")
PROGRAM = "name = strange\n" + "".join(
    f"offset = {place}\nminor = {minor}\npush r, rsp\nlog 1\nexit\n" for minor, place in enumerate(PLACES, 1)
)

KINDS = (
    ("stack", 0), ("stack", 0x900), ("stack", 1 << 63), ("stack", (1 << 64) - 8), ("stack", 0xFFFFFFFFFF600800),
    ("gs", 1), ("fs", 2), ("ds", 1), ("es", 2), ("gs_base", 0xFFFF800000000000),
    ("flags", 1 << 10), ("flags", 1 << 18),
)  # fmt: skip

# What raises an error in the tracer at each hit of a process, as something that nobody has thought of would.
FAILING = """
import sys
if sys.orig_argv[1:4] == ["-P", "-m", "dprobes.engines.ptrace.tracer.tracer_process"]:
    from pathlib import Path
    from dprobes.engines.ptrace.tracer.hit_handling import HitHandler
    on_breakpoint = HitHandler.on_breakpoint
    def failing(self, thread):
        if Path(f"/proc/{thread.pid}/comm").read_text() == "odd\\n":
            raise OverflowError("what nobody has thought of")
        on_breakpoint(self, thread)
    HitHandler.on_breakpoint = failing
"""


@pytest.mark.parametrize(("kind", "operand"), KINDS)
def test_strange_registers_change_nothing(build: Builder, run: Runner, kind: str, operand: int) -> None:
    result = run.command(PROGRAM, build("strange.c"), kind, operand)
    assert result.stdout == "50 50\n"
    assert [result.counts[minor].hits for minor in range(1, 5)] == [100] * 4
    if kind == "stack" and operand:
        assert [words[0] for words in result.words(4)].count(operand) == 50


@pytest.mark.parametrize(("kind", "operand"), [("stack", (1 << 64) - 4096), ("stack", 0x900), ("gs", 1)])
def test_a_run_ends_well_while_a_strange_thread_sleeps(build: Builder, run: Runner, kind: str, operand: int) -> None:
    program = build("strange.c")
    with running(program, kind, operand, "forever") as target:
        assert await_line(target) == "there\n"
        client, output = run.start(PROGRAM, ["-p", str(target.pid)])
        await_true(lambda: output.exists() and output.stat().st_size > 0, "records")
        client.send_signal(signal.SIGINT)
        result = read_result(client, output)
        assert result.status == 0, result.stderr
        assert "internal error" not in result.stderr
        assert tracer_of(target.pid) == 0
        assert code_is_original(target.pid, program)
        assert target.poll() is None


def test_only_the_process_of_a_thread_that_cannot_be_served_goes_on_without_probes(
    build: Builder, run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = build("strange.c")
    odd = tmp_path / "odd"
    odd.symlink_to(program)
    (tmp_path / "sitecustomize.py").write_text(FAILING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # The other one begins when the odd one has gone on alone, and ended.
    command = f"{odd} flags 0x200; {program} flags 0x200; {odd} flags 0x200"
    result = run(PROGRAM, ["--exit-status", "--", "sh", "-c", command])
    assert (result.status, result.stdout) == (0, "50 50\n" * 3), result.stderr
    assert [result.counts[minor].hits for minor in range(1, 5)] == [100] * 4
    assert result.stderr.count("cannot be served (what nobody has thought of)") == 2
    assert result.stderr.count("it continues without probes; this may be a bug in dprobes: please report it") == 2
    assert "internal error" not in result.stderr
