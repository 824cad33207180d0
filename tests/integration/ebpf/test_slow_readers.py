"""Records that come faster than they are taken: what is lost is counted, and probepoints are taken away still."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.ebpf.objects import await_attached, await_gone, is_attached
from integration.support import TIMEOUT, await_message, await_true, processor_time, read_result

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner

ENGINE = ("--engine", "auto")
LARGE = """name = "{path}"
logmax = 512
offset = tick
minor = 1
{extra}push 300
push r, sp
log mrf
exit
"""


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


def call_with_reader_stopped(client: subprocess.Popen[str], program: Path, threads: int, count: int) -> None:
    client.send_signal(signal.SIGSTOP)
    words = [str(program), str(threads), str(count)]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.stdout == f"{threads * count}\n"


def test_what_a_stopped_reader_misses_is_counted(build: Builder, run: Runner) -> None:
    program = build("threads.c")
    client, output = run.start(LARGE.format(path=program, extra=""), [], [*ENGINE, "--ring-size", "1"])
    await_attached(client)
    call_with_reader_stopped(client, program, 4, 5000)
    client.send_signal(signal.SIGCONT)
    result = run.end(client, output)
    counts = result.counts[1]
    assert counts.hits == 20000 == counts.records + counts.lost
    assert len(result.records) == counts.records
    assert 2000 < counts.records < 4000  # as many as 1 MiB takes


def test_a_limit_that_is_reached_behind_a_full_ring_holds(build: Builder, run: Runner) -> None:
    """The wish to be taken away is an entry of the ring as well, for which there was no room."""
    program = build("threads.c")
    source = LARGE.format(path=program, extra="maxhits = 15000\n")
    client, output = run.start(source, [], [*ENGINE, "--ring-size", "1"])
    objects = await_attached(client)
    call_with_reader_stopped(client, program, 4, 5000)
    client.send_signal(signal.SIGCONT)
    await_true(lambda: not is_attached(client.pid), "the end of the probepoint")
    result = run.end(client, output)
    counts = result.counts[1]
    assert counts.hits == 15000 == counts.records + counts.lost
    assert len(result.records) == counts.records
    await_gone(objects)


def test_a_reader_that_is_killed_with_a_full_ring_leaves_nothing(build: Builder, run: Runner) -> None:
    program = build("threads.c")
    client, _ = run.start(LARGE.format(path=program, extra=""), [], [*ENGINE, "--ring-size", "1"])
    objects = await_attached(client)
    call_with_reader_stopped(client, program, 4, 2000)
    client.kill()
    client.wait(TIMEOUT)
    await_gone(objects)


def test_another_interrupt_gives_up_what_is_not_written_yet(build: Builder, run: Runner) -> None:
    program = build("threads.c")
    source = f'name = "{program}"\noffset = tick\nminor = 1\nexit\n'
    client, output = run.start(source, [], [*ENGINE, "--ring-size", "64"])
    objects = await_attached(client)
    call_with_reader_stopped(client, program, 4, 150000)
    client.send_signal(signal.SIGINT)
    client.send_signal(signal.SIGCONT)
    said = await_message(client, "hint:")
    assert said == (
        "dprobes: note: 1 probepoint is active; Ctrl-C ends the run\n"
        "dprobes: note: probing has ended; earlier records are still being written\n"
        "hint: Ctrl-C discards them, and counts them as lost\n"
    )
    client.send_signal(signal.SIGINT)
    result = read_result(client, output)
    assert result.status == 0
    counts = result.counts[1]
    assert counts.hits == 600000 == counts.records + counts.lost
    assert len(result.records) == counts.records < 600000
    await_gone(objects)


def test_call_stacks_that_come_faster_than_they_are_followed_keep_no_run_from_its_end(
    build: Builder, run: Runner
) -> None:
    """Changes of tables are no records: there is nothing to give out while their stacks are followed."""
    program = build("threads.c")
    source = f'name = "{program}"\ntable = stacks, count, ustack[8]\noffset = tick\ntally stacks\nabort\n'
    with subprocess.Popen([program, "2", str(1 << 62)]) as endless:
        try:
            client, output = run.start(source, ["-p", str(endless.pid)], ENGINE)
            objects = await_attached(client)
            before = processor_time(endless.pid)
            await_true(lambda: processor_time(endless.pid) > before + 50, "hits for half a second: many wait")
            client.send_signal(signal.SIGINT)
            await_true(lambda: not is_attached(client.pid), "the end of the probepoint")
            client.send_signal(signal.SIGINT)
            result = read_result(client, output)
        finally:
            endless.kill()
    assert result.status == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert any(row.get("keys", [[""]])[0][0] == "tick [threads]" for row in rows)
    # Each hit is there: with its stack, without it, or as one for which there was no room.
    assert sum(row.get("value", row.get("lost")) for row in rows) == result.counts[0].hits > 0
    await_gone(objects)
