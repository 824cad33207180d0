"""Watchpoints in modules, wherever those lie: exact counts, processes that come and go, and four registers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ebpf.ebpf_engine import EbpfEngine
from integration.ebpf.insessions import followed, job_for
from integration.ebpf.kernel import has_begun, link_count, require_bpf, require_initial_namespace
from integration.support import TIMEOUT, await_line, await_true, kernel_state, running, symbols_of

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Result, Runner

pytestmark = pytest.mark.usefixtures("debug_registers")

EBPF = ["--engine", "ebpf"]


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


def watch(
    access: str = "w", place: str = "cell:cell+3", minor: int = 1, body: str = "log 0\n", header: str = ""
) -> str:
    return f"address = {place}\nwatchpoint = {access}\nminor = {minor}\n{header}{body}exit\n"


def program_of(module: Path, *definitions: str) -> str:
    return f'name = "{module}"\n' + "".join(definitions or (watch(),))


def command(run: Runner, source: str, *words: object) -> Result:
    """Run a program on a command that must end well, and be watched from its start."""
    result = run(source, ["--exit-status", "--", *map(str, words)], EBPF)
    assert result.status == 0, result.stderr + result.stdout
    assert "continued before" not in result.stderr
    assert "DEBUGREG_UNAVAIL" not in result.stderr, result.stderr
    return result


@contextlib.contextmanager
def everywhere(run: Runner, source: str, results: list[Result], *scope: str):  # type: ignore[no-untyped-def]
    """Watch while the block runs; the result is put into the list."""
    client, output = run.start(source, list(scope), EBPF)
    await_true(lambda: has_begun(client.pid), "the watchpoints")
    yield client
    results.append(run.end(client, output))
    assert results[-1].counts, results[-1].stderr


def accesses(*words: object) -> int:
    """Run a program and return how many writes it says it made."""
    text = subprocess.run([str(w) for w in words], check=True, capture_output=True, text=True, timeout=TIMEOUT).stdout
    return int(text.splitlines()[-1].split()[0])


@pytest.mark.parametrize("kind", ["-pie", "-no-pie", "-static-pie"])
@pytest.mark.parametrize("mode", [("threads", 50, 4), ("short", 10, 3), ("fork", 8), ("vfork", 8), ("exec", 4)])
def test_a_command_is_watched_from_its_first_instruction(
    build: Builder, run: Runner, kind: str, mode: tuple[object, ...]
) -> None:
    program = build("watched.c", kind)
    result = command(run, program_of(program, watch(), watch("rw", minor=2)), program, *mode)
    writes, reads = map(int, result.stdout.splitlines()[-1].split())
    assert {minor: count.hits for minor, count in result.counts.items()} == {1: writes, 2: writes + reads}
    assert len(result.records) == 2 * writes + reads


@pytest.mark.parametrize("mode", [("threads", 50, 4), ("fork", 8), ("spawn", 4)])
def test_a_program_of_32_bits(build: Builder, run: Runner, mode: tuple[object, ...]) -> None:
    program = build("watched.c", i386=True)
    result = command(run, program_of(program), program, *mode)
    assert result.counts[1].hits == int(result.stdout.splitlines()[-1].split()[0])


def test_symbols_have_their_addresses_in_the_process(build: Builder, run: Runner) -> None:
    program = build("watched.c")
    body = "push cell\npush mem, u64\npush cell\npush put\nsub\nlog 2\n"
    result = command(run, program_of(program, watch(body=body)), program, "threads", 6, 1)
    distance = symbols_of(program)["put"] - symbols_of(program)["cell"]
    assert [[value % 2**64 for value in words] for words in result.words()] == [[distance % 2**64, n] for n in range(6)]


def test_a_library_that_is_loaded_again_and_again(build: Builder, run: Runner) -> None:
    library = build("plugin.c", "-shared", "-fPIC", name="libplugin.so")
    result = command(
        run, program_of(library, watch(place="calls:calls+3")), build("watched.c", "-ldl"), "library", 20, library
    )
    # The constructor writes as well.
    assert result.counts[1].hits == 3 * 21


def test_a_running_process_and_what_it_starts(build: Builder, run: Runner) -> None:
    program = build("watched.c")
    results: list[Result] = []
    with (
        running(program, "wait", stdin=subprocess.PIPE) as target,
        running(program, "wait", stdin=subprocess.PIPE) as other,
    ):
        for process in (target, other):
            await_line(process)
        with everywhere(run, program_of(program), results, "-p", str(target.pid)):
            for process in (target, other, target):
                assert process.stdin is not None
                process.stdin.write("x")
                process.stdin.flush()
                assert await_line(process) == "done\n"
    assert results[0].counts[1].hits == 2
    assert {record["pid"] for record in results[0].records} == {target.pid}


def test_all_processes_that_come_later(build: Builder, run: Runner) -> None:
    program = build("watched.c")
    results: list[Result] = []
    with everywhere(run, program_of(program), results):
        writes = sum(
            accesses(program, *mode)
            for mode in [("threads", 20, 3), ("put",), ("fork", 3), ("exec", 3), ("put",), ("put",)]
        )
    assert "DEBUGREG_UNAVAIL" not in results[0].stderr
    assert "continued before" not in results[0].stderr
    assert results[0].counts[1].hits == writes
    assert len({record["pid"] for record in results[0].records}) == 1 + 1 + 3 + 3 + 1 + 1


def test_only_processes_that_map_the_module_count(build: Builder, run: Runner, tmp_path: Path) -> None:
    program = build("watched.c", "-no-pie")
    twin = tmp_path / "twin"
    shutil.copy(program, twin)
    cell = symbols_of(program)["cell"]
    source = program_of(program, watch(), watch(place=f"{cell:#x}:{cell + 3:#x}", minor=2))
    result = command(run, source, "sh", "-c", f"{twin} threads 9 1; {program} put; {twin} put; {program} fork 2")
    assert {minor: count.hits for minor, count in result.counts.items()} == {1: 3, 2: 3}


def test_a_register_serves_all_processes_with_the_module_at_one_place_and_comes_back(
    build: Builder, run: Runner
) -> None:
    program, fixed = build("watched.c"), build("watched.c", "-no-pie")
    results: list[Result] = []
    with everywhere(run, program_of(fixed), results), contextlib.ExitStack() as stack:
        targets = [stack.enter_context(running(fixed, "wait", stdin=subprocess.PIPE)) for _ in range(6)]
        written = [write(target) for target in targets]
    assert results[0].counts[1].hits == sum(written) == 6
    assert "DEBUGREG_UNAVAIL" not in results[0].stderr
    with everywhere(run, program_of(program), results), contextlib.ExitStack() as stack:
        targets, written = [], []
        for _ in range(5):
            targets.append(stack.enter_context(running(program, "wait", stdin=subprocess.PIPE)))
            written.append(write(targets[-1]))
        for target in targets:
            target.kill()
            target.wait()
        # Their places are free again, and so are the registers.
        later = [accesses(program, "put") for _ in range(8)]
    stderr = results[1].stderr
    refused = (
        f"DEBUGREG_UNAVAIL in process {targets[4].pid}: all debug registers of a CPU are in use; not inserted there"
    )
    assert stderr.count("DEBUGREG_UNAVAIL") == stderr.count(refused) == 1
    assert results[1].counts[1].hits == sum(written) - 1 + sum(later) == 12


def write(target: subprocess.Popen[str]) -> int:
    """Let a program write once."""
    await_line(target)
    assert target.stdin is not None
    target.stdin.write("x")
    target.stdin.flush()
    assert await_line(target) == "done\n"
    return 1


def test_maxhits_takes_the_watchpoint_away(build: Builder, run: Runner) -> None:
    program = build("watched.c")
    results: list[Result] = []
    with everywhere(run, program_of(program, watch(header="maxhits = 5\npasscount = 2\n")), results) as client:
        assert accesses(program, "threads", 30, 2) == 60
        await_true(lambda: link_count(client.pid) == 0, "the end of the breakpoints, and of what they needed")
        assert accesses(program, "put") == 1
    count = results[0].counts[1]
    assert (count.hits, count.passed, count.records) == (7, 2, 5)


def test_a_killed_run_leaves_no_breakpoint(build: Builder, run: Runner) -> None:
    program = build("watched.c", "-no-pie")
    client, _ = run.start(program_of(program), [], EBPF)
    await_true(lambda: has_begun(client.pid), "the watchpoint")
    client.send_signal(signal.SIGKILL)
    client.wait(TIMEOUT)
    # All four registers of every CPU can be had again.
    definitions = [watch(minor=n, place=f"bytes+{8 * n}:bytes+{8 * n + 7}") for n in range(4)]
    result = command(run, program_of(program, *definitions), program, "parts")
    assert [count.hits for count in result.counts.values()] == [9] * 4


def test_the_end_of_a_session_leaves_no_descriptor(build: Builder, leaves_no_descriptor: None) -> None:
    with followed(EbpfEngine(), job_for(build("watched.c"), f"{watch()}offset = main\nminor = 2\nexit\n")) as following:
        assert len(following.hits) == 2


def test_an_address_that_no_program_can_have(build: Builder, run: Runner) -> None:
    program = build("watched.c")
    result = command(run, program_of(program, watch(), watch(place="0xffffffff81000000", minor=2)), program, "put")
    assert "warning: INVALID_OFFSET: no program can have the address 0xffffffff81000000; not inserted" in result.stderr
    assert {minor: count.hits for minor, count in result.counts.items()} == {1: 1, 2: 0}


def test_auto_leaves_trees_to_ptrace(build: Builder, run: Runner) -> None:
    program = build("watched.c")
    result = run(program_of(program), ["--", str(program), "put"], ["--engine", "auto", "-v"])
    reason = "'watchpoint = w' sees accesses from the very start of a process only there"
    assert f"note: engine ptrace: {reason}\n" in result.stderr
    assert result.counts[1].hits == 1


def test_processes_of_another_user_are_out_of_scope(build: Builder, run: Runner) -> None:
    program = build("watched.c")
    results: list[Result] = []
    with running(program, "wait", stdin=subprocess.PIPE) as target:
        with everywhere(run, program_of(program), results, "--uid", "nobody"):
            accesses(program, "put")
            write(target)
        with everywhere(run, program_of(program), results, "--uid", str(os.getuid())):
            accesses(program, "put")
    assert [result.counts[1].hits for result in results] == [0, 1]


def test_a_process_that_nobody_serves_goes_on_and_that_is_said(build: Builder, run: Runner) -> None:
    program = build("watched.c")
    results: list[Result] = []
    with everywhere(run, program_of(program), results) as client:
        client.send_signal(signal.SIGSTOP)
        await_true(lambda: kernel_state(client.pid) == "T", "the stop")
        assert accesses(program, "put") == 1
        client.send_signal(signal.SIGCONT)
    said = f"warning: a process continued before '{program}' was watched there; earlier accesses are not counted\n"
    assert said in results[0].stderr
    assert results[0].counts[1].hits == 0


def test_processes_of_a_cgroup_that_run_already(build: Builder, run: Runner, cgroup: Path) -> None:
    program = build("watched.c", "-no-pie")
    results: list[Result] = []
    with contextlib.ExitStack() as stack:
        inside, below, outside = (
            stack.enter_context(running(program, "wait", stdin=subprocess.PIPE)) for _ in range(3)
        )
        (cgroup / "cgroup.procs").write_text(str(inside.pid))
        (cgroup / "below" / "cgroup.procs").write_text(str(below.pid))
        with everywhere(run, program_of(program), results, "--cgroup", str(cgroup)):
            written = [write(target) for target in (inside, below, outside)]
    assert results[0].counts[1].hits == sum(written) - 1
    assert {record["pid"] for record in results[0].records} == {inside.pid, below.pid}


def test_all_kinds_of_probe_in_one_program(build: Builder, run: Runner) -> None:
    program = build("watched.c")
    others = (
        "offset = put\nminor = 2\ninc lv, 0\nlog 0\nexit\n"
        "sampler = 1000hz\nminor = 3\nlog 0\nexit\n"
        "offset = get\nreturn = yes\nminor = 4\npush r, retval\nlog 1\nexit\n"
    )
    source = f'name = "{program}"\nvars = 1\n' + watch("rw", body="push lv, 0\nlog 1\n") + others
    result = command(run, source, program, "threads", 40, 1)
    counts = result.counts
    assert {minor: counts[minor].hits for minor in (1, 2, 4)} == {1: 80, 2: 40, 4: 40}
    # The breakpoint counts before the write that it precedes; the read that follows comes with the same number.
    assert [words[0] for words in result.words(1)] == [n for turn in range(1, 41) for n in (turn, turn)]
    assert [words[0] for words in result.words(4)] == list(range(40))
    assert counts[3].hits == counts[3].records == sum(record["minor"] == 3 for record in result.records)
