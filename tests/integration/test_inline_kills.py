"""
``kill -9`` of all there is of the tool, and a process that goes on as if nothing had been.

Its code is the file's again, and nothing of ours is mapped in it.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ptrace.restorer_messages import ENTRIES, entries_in, length_in
from dprobes.platform.linux.procfs import thread_state, threads_of
from integration.support import (
    DPROBES,
    TIMEOUT,
    await_line,
    await_traced,
    await_true,
    children_of,
    code_is_original,
    command_of,
    environment,
    is_traced,
    load_bias,
    memory_at,
    read_memory,
    running,
    tracer_of,
)

if TYPE_CHECKING:
    from integration.support import Builder, Runner

INLINE = ["--engine", "inline"]
HOT = "name = torture\noffset = stepped\nminor = 1\nabort\n"
WAYS = [("tracer",), ("client", "tracer"), ("tracer", "client"), ("client",)]


def jump_is_at(pid: int, program: Path) -> bool:
    return memory_at(pid, program, "stepped", 1) == b"\xe9"


def ours(pid: int) -> int:
    """Return how much is mapped in a process that is not the file's: memory of the tool, and code of no file."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return sum("/memfd:dprobes" in row or ("x" in row[1] and len(row) < 6) for row in lines)


def kill(ways: tuple[str, ...], client: subprocess.Popen[str], tracer: int) -> None:
    for who in ways:
        os.kill(client.pid if who == "client" else tracer, signal.SIGKILL)


def await_restored(pid: int, program: Path) -> None:
    await_true(lambda: not is_traced(pid), "the end of tracing", TIMEOUT)
    await_true(lambda: code_is_original(pid, program), "the code of the file", TIMEOUT)


def await_clean(pid: int, program: Path) -> None:
    await_restored(pid, program)
    await_true(lambda: not ours(pid), "the end of all mappings", TIMEOUT)


@pytest.mark.parametrize("ways", WAYS, ids="+".join)
def test_nothing_is_left_of_a_killed_tool(build: Builder, run: Runner, ways: tuple[str, ...]) -> None:
    program = build("torture.c")
    with running(program, 600, 2) as target:
        await_line(target)
        client, _ = run.start(HOT, ["-p", str(target.pid)], INLINE)
        tracer = await_traced(target.pid)
        await_true(lambda: jump_is_at(target.pid, program), "a jump")
        kill(ways, client, tracer)
        client.communicate(timeout=TIMEOUT)
        await_clean(target.pid, program)
        assert target.poll() is None
        target.send_signal(signal.SIGUSR2)
        assert target.wait(TIMEOUT) == 0


def kill_all(client: subprocess.Popen[str], *others: int) -> None:
    """Kill a client with its children, none of which has the time to see another one end."""
    client.send_signal(signal.SIGSTOP)
    await_true(lambda: thread_state(client.pid) == "T", "the stop of the client", TIMEOUT)
    for pid in (*others, client.pid):
        os.kill(pid, signal.SIGKILL)
    client.communicate(timeout=TIMEOUT)


def cpu_seconds(pid: int) -> float:
    """Return how much of a processor a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_for(pid: int, seconds: float) -> None:
    """Wait until a process has used so much of a processor."""
    enough = cpu_seconds(pid) + seconds
    await_true(lambda: cpu_seconds(pid) >= enough, f"{seconds} s of a processor", TIMEOUT)


def hot_without_restorer(run: Runner, pid: int, program: Path) -> tuple[subprocess.Popen[str], int]:
    """Return a client and its tracer that have jumps in a process, after the end of the restorer."""
    client, _ = run.start(HOT, ["-p", str(pid)], INLINE)
    tracer = await_traced(pid)
    await_true(lambda: jump_is_at(pid, program), "a jump")
    (restorer,) = [child for child in children_of(client.pid) if child != tracer]
    os.kill(restorer, signal.SIGKILL)
    return client, tracer


def test_handlers_do_nothing_more_if_nobody_is_left_to_take_them_out(build: Builder, run: Runner) -> None:
    program = build("torture.c")
    with running(program, 600, 2) as target:
        await_line(target)
        kill_all(*hot_without_restorer(run, target.pid, program))
        await_true(lambda: not is_traced(target.pid), "the end of tracing", TIMEOUT)
        assert jump_is_at(target.pid, program)
        run_for(target.pid, 0.2)  # handlers that have begun come to their end
        before = shared_memory(target.pid)
        run_for(target.pid, 0.2)
        assert shared_memory(target.pid) == before
        target.send_signal(signal.SIGUSR2)
        assert target.wait(TIMEOUT) == 0


@pytest.mark.parametrize("by", ["the next run", "stop"])
def test_what_is_left_is_taken_out_when_somebody_comes(build: Builder, run: Runner, by: str) -> None:
    program = build("torture.c")
    with running(program, 600, 2) as target:
        await_line(target)
        client, _ = run.start(HOT, ["-p", str(target.pid)], INLINE)
        await_traced(target.pid)
        await_true(lambda: jump_is_at(target.pid, program), "a jump")
        kill_all(client, *children_of(client.pid))
        await_true(lambda: not is_traced(target.pid), "the end of tracing", TIMEOUT)
        assert jump_is_at(target.pid, program)
        # The other one is where the linker tells of libraries.
        said = f"process {target.pid}: 2 places in its code were restored, and the memory of handlers was given back\n"
        if by == "stop":
            stop = [*DPROBES, "stop", "--left"]
            done = subprocess.run(stop, check=True, capture_output=True, text=True, timeout=TIMEOUT, env=environment())
            assert said in done.stdout
            await_clean(target.pid, program)
        else:
            client, output = run.start(HOT, ["-p", str(target.pid)], INLINE)
            # Before there is its tracer, the client itself takes out the jump that is left.
            tracing = "ptrace.tracer.tracer_process"
            await_true(lambda: tracing in command_of(tracer_of(target.pid)), "the new tracer", TIMEOUT)
            await_true(lambda: jump_is_at(target.pid, program), "a jump", TIMEOUT)
            run_for(target.pid, 0.2)
            result = run.end(client, output)
            assert f"dprobes: note: killed runs left something in {said}" in result.stderr
            assert result.counts[1].hits
            await_clean(target.pid, program)
        assert target.poll() is None
        target.send_signal(signal.SIGUSR2)
        assert target.wait(TIMEOUT) == 0


def test_a_client_that_is_left_takes_out_jumps_as_well(build: Builder, run: Runner) -> None:
    program = build("torture.c")
    with running(program, 600, 2) as target:
        await_line(target)
        client, tracer = hot_without_restorer(run, target.pid, program)
        os.kill(tracer, signal.SIGKILL)
        client.communicate(timeout=TIMEOUT)
        assert code_is_original(target.pid, program)
        assert target.poll() is None
        target.send_signal(signal.SIGUSR2)
        assert target.wait(TIMEOUT) == 0


def test_a_client_takes_the_place_of_a_restorer_that_was_killed(build: Builder, run: Runner) -> None:
    program = build("torture.c")
    with running(program, 600, 2) as target:
        await_line(target)
        client, tracer = hot_without_restorer(run, target.pid, program)
        # It is held at its end until breakpoints are out.
        await_true(lambda: tracer_of(tracer) in threads_of(client.pid), "the guard of the client", TIMEOUT)
        client.send_signal(signal.SIGINT)
        client.communicate(timeout=TIMEOUT)
        await_clean(target.pid, program)  # threads were in handlers when the tracer ended
        assert target.poll() is None
        target.send_signal(signal.SIGUSR2)
        assert target.wait(TIMEOUT) == 0


def test_no_thread_of_a_running_process_meets_a_breakpoint_before_there_are_jumps(build: Builder, run: Runner) -> None:
    program = build("torture.c")
    with running(program, 600, 1) as target:
        await_line(target)
        original = memory_at(target.pid, program, "stepped", 1)
        client, output = run.start(HOT, ["-p", str(target.pid)], INLINE)
        seen = [original]

        def has_jump() -> bool:
            seen.append(memory_at(target.pid, program, "stepped", 1))
            return seen[-1] == b"\xe9"

        await_true(has_jump, "a jump", TIMEOUT)
        assert set(seen) == {original, b"\xe9"}
        run.end(client, output)


def test_a_command_begins_when_the_tracer_is_guarded(build: Builder, tmp_path: Path) -> None:
    """Else nobody holds the tracer should it be killed, and threads run into breakpoints."""
    late = build("late_restorer.c", "-shared", "-fPIC", name="late_restorer.so")
    source, begun = tmp_path / "hot.rpn", tmp_path / "begun"
    source.write_text('name = "libc.so.6"\noffset = getppid\nminor = 1\nabort\n')
    command = [*DPROBES, "run", str(source), *INLINE, "--", "sh", "-c", f"echo > {begun}; sleep 600 & wait"]
    variables = {**environment(), "LD_PRELOAD": str(late), "BEGUN": str(begun)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=variables) as client:
        try:
            await_true(begun.exists, "the beginning of the command", TIMEOUT)
            (tracer,) = [each for each in children_of(client.pid) if "ptrace.tracer.tracer_process" in command_of(each)]
            assert "restorer_process" in command_of(tracer_of(tracer))
        finally:
            client.terminate()


def listed(pid: int) -> set[tuple[int, bytes]]:
    """Return what is listed in a process as written into its code."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/memfd:dprobes-left" in line:
            start = int(line.partition("-")[0], 16)
            length = length_in(read_memory(pid, start, ENTRIES)) or 0
            entries = entries_in(read_memory(pid, start + ENTRIES, length))
            return {each for entry in entries for patch in entry.writes for each in patch.writes}
    return set()


def test_the_breakpoint_at_the_loader_is_listed_before_it_is_there(build: Builder, run: Runner) -> None:
    program = build("torture.c")
    with running(program, 600, 1) as target:
        await_line(target)
        loader = Path(re.findall(r"/\S+/ld-linux\S+", Path(f"/proc/{target.pid}/maps").read_text())[0])
        symbols = subprocess.run(
            ["nm", "-D", loader], check=True, capture_output=True, text=True, timeout=TIMEOUT
        ).stdout
        found = re.search(r"(\w+) T _dl_debug_state", symbols)
        assert found is not None
        place = load_bias(target.pid, loader) + int(found[1], 16)
        original = read_memory(target.pid, place, 1)
        client, output = run.start(HOT, ["-p", str(target.pid)], INLINE)
        await_true(lambda: read_memory(target.pid, place, 1) != original, "a breakpoint at the loader", TIMEOUT)
        assert (place, b"\xcc") in listed(target.pid)
        run.end(client, output)


def shared_memory(pid: int) -> bytes:
    """Return the memory that handlers count in."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/memfd:dprobes" in line:
            start, end = (int(number, 16) for number in line.split()[0].split("-"))
            with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
                memory.seek(start)
                return memory.read(min(end - start, 1 << 20))
    raise AssertionError("nothing is shared")


def survive(build: Builder, run: Runner, rounds: int, seed: int) -> dict[str, int]:
    """
    Kill the tool at random moments; return how many programs ended, which never computed anything wrong.

    A program whose tool is killed as memory is being shared may keep a mapping that nothing uses: it is not harmed.
    """
    program, dice = build("torture.c"), random.Random(seed)
    ends = {"clean": 0, "mapping left": 0, "SIGTRAP": 0}
    for _ in range(rounds):
        with running(program, 600, 2) as target:
            await_line(target)
            client, _ = run.start(HOT, ["-p", str(target.pid)], INLINE)
            tracer = await_traced(target.pid)
            time.sleep(dice.uniform(0, 0.5))
            kill(dice.choice(WAYS), client, tracer)
            client.communicate(timeout=TIMEOUT)
            end = "clean"
            if target.poll() is None:
                await_restored(target.pid, program)
                if not is_unmapped(target.pid):
                    end = "mapping left"
                target.send_signal(signal.SIGUSR2)
            assert target.wait(TIMEOUT) in (0, -signal.SIGTRAP)
            ends["SIGTRAP" if target.returncode else end] += 1
    return ends


def is_unmapped(pid: int) -> bool:
    """Return whether all mappings of ours go."""
    until = time.monotonic() + TIMEOUT / 3
    while ours(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not ours(pid)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(3, 23))
def test_programs_survive_kills_at_any_moment(build: Builder, run: Runner, seed: int) -> None:
    """A thousand kills, in batches."""
    ends = survive(build, run, 50, seed)
    print(ends)
    assert ends["SIGTRAP"] == 0
    assert ends["mapping left"] <= 3
