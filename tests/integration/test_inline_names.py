"""Records of handlers in processes say who hit, and no handler has asked the kernel for that."""

from __future__ import annotations

import signal
from collections import Counter
from typing import TYPE_CHECKING

from integration.support import TIMEOUT, await_line, await_true, code_is_original, is_traced, running

if TYPE_CHECKING:
    from integration.support import Builder, Runner

INLINE = ["--engine", "inline", "--log", "ALL"]


def logging(program: str) -> str:
    return f"name = {program}\noffset = touch\nminor = 1\npush r, rdi\nlog 1\nexit\n"


def test_threads_hit_for_the_first_time_where_system_calls_are_deadly(build: Builder, run: Runner) -> None:
    result = run(logging("sealed"), ["--exit-status", "--", str(build("sealed.c")), "4", "5000"], INLINE)
    counts = result.counts[1]
    assert (result.status, result.stdout) == (0, "20000\n")
    assert counts.hits == counts.records + counts.lost == 20_000
    assert "inline" in counts.executed
    assert {record["name"] for record in result.records} == {"sealed"}
    assert len({record["tid"] for record in result.records}) == 4


def test_a_process_where_system_calls_are_deadly_survives_the_end_of_tracing(build: Builder, run: Runner) -> None:
    program = build("sealed.c")
    with running(program, 2, 1000, 600) as target:
        client, _ = run.start(logging("sealed"), ["-p", str(target.pid)], INLINE)
        assert await_line(target) == "2000\n"
        client.send_signal(signal.SIGINT)
        _, stderr = client.communicate(timeout=TIMEOUT)
        assert "Traceback" not in stderr, stderr
        await_true(lambda: not is_traced(target.pid), "the end of tracing", TIMEOUT)
        assert target.poll() is None
        assert code_is_original(target.pid, program)


def test_the_short_lived_have_their_names(build: Builder, run: Runner) -> None:
    result = run(logging("called"), ["--exit-status", "--", str(build("called.c"))], INLINE)
    assert (result.status, result.stdout) == (0, "done\n")
    assert "inline" in result.counts[1].executed
    names = {number: record["name"] for (number,), record in zip(result.words(), result.records, strict=True)}
    assert names == {
        **{n: f"thread-{n}" for n in range(40)},
        **{first + n: "called" for first in (1000, 2000) for n in range(10)},
    }
    processes = {n: record["pid"] for (n,), record in zip(result.words(), result.records, strict=True)}
    per_process = Counter(processes.values())
    assert sorted(per_process.values()) == [1] * 20 + [40], "each process has an id of its own"
    assert all(record["uid"] == result.records[0]["uid"] for record in result.records)
