"""Probed instructions are executed out of line wherever there is memory for that, and all of it is given back."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.platform.linux.procfs import thread_state
from integration.support import (
    TIMEOUT,
    await_breakpoint,
    await_line,
    await_true,
    children_of,
    code_is_original,
    is_traced,
    running,
    tracer_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.support import Builder, Runner

SITES = ("work_load", "work_count", "work_store", "work_repeat", "work_call", "work_add")
PROGRAM = "name = slots\n" + "".join(
    f"offset = {site}\nminor = {minor}\npush r, eip\nlog 1\nexit\n" for minor, site in enumerate(SITES)
)
TURNS = 100
FIRST_SUM, SECOND_SUM = "31300", "91300"


@contextlib.contextmanager
def waiting(program: Path, mode: str) -> Iterator[subprocess.Popen[str]]:
    """Start the program in a mode; it waits for a byte before it executes anything that is probed."""
    with running(program, mode, stdin=subprocess.PIPE) as target:
        first = await_line(target).strip()
        if first == "unable":
            pytest.skip(f"this kernel cannot do '{mode}'")
        yield target


def ask(target: subprocess.Popen[str]) -> str:
    """Let the program work, and return what it computed."""
    assert target.stdin is not None
    target.stdin.write("x")
    target.stdin.flush()
    return await_line(target).strip()


def maps_of(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def private_code_pages(pid: int, program: Path) -> int:
    """Return how many KiB of a program's code are copies of its own, as smaps has it."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    pattern = rf"^\S+ r-xp .* {re.escape(str(program))}\n(?:[A-Z].*\n)*?Anonymous: +(\d+) kB"
    (found,) = re.findall(pattern, text, re.MULTILINE)
    return int(found)


MODES = {"plain": "in a page", "mdwe": "in a page", "seccomp": "in padding", "full": "in padding"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])
def test_instructions_are_executed_where_there_is_room(build: Builder, run: Runner, mode: str, i386: bool) -> None:
    program = build("slots.c", *(("-no-pie",) if i386 else ()), i386=i386)
    with waiting(program, mode) as target:
        before = maps_of(target.pid)
        client, output = run.start(PROGRAM, ["-p", str(target.pid)])
        await_breakpoint(target.pid, program, SITES[-1])
        assert private_code_pages(target.pid, program) > 0
        assert ask(target) == FIRST_SUM
        during = maps_of(target.pid)
        result = run.end(client, output)
        assert ask(target) == SECOND_SUM
        for minor in range(len(SITES)):
            assert result.counts[minor].hits == result.counts[minor].records == TURNS
            assert result.counts[minor].executed == MODES[mode]
        size = 4 if i386 else 8
        assert all(len(set(map(tuple, result.words(minor, size)))) == 1 for minor in range(len(SITES)))
        assert (len(during.splitlines()) > len(before.splitlines())) == (MODES[mode] == "in a page")
        assert code_is_original(target.pid, program)
        assert maps_of(target.pid) == before
        # Under seccomp nobody can make the process call madvise.
        assert (private_code_pages(target.pid, program) > 0) == (mode == "seccomp")


def test_a_parent_that_waits_for_its_vfork_child_keeps_no_page(build: Builder, run: Runner) -> None:
    program = build("slots.c")
    with waiting(program, "plain") as target:
        before = maps_of(target.pid)
        client, output = run.start(PROGRAM, ["-p", str(target.pid)])
        await_breakpoint(target.pid, program, SITES[-1])
        assert ask(target) == FIRST_SUM
        assert maps_of(target.pid) != before
        assert target.stdin is not None
        target.stdin.write("v")
        target.stdin.flush()
        await_true(lambda: children_of(target.pid) != [], "the child")
        run.end(client, output)
        assert maps_of(target.pid) == before
        assert private_code_pages(target.pid, program) == 0
        target.stdin.write("x")
        target.stdin.flush()
        assert ask(target) == SECOND_SUM


def test_a_program_that_is_about_to_receive_a_signal_keeps_no_page(build: Builder, run: Runner) -> None:
    program = build("slots.c")
    with waiting(program, "caught") as target:
        before = maps_of(target.pid)
        client, _ = run.start(PROGRAM, ["-p", str(target.pid)])
        await_breakpoint(target.pid, program, SITES[-1])
        assert ask(target) == FIRST_SUM
        assert maps_of(target.pid) != before
        tracer = tracer_of(target.pid)
        os.kill(tracer, signal.SIGSTOP)
        target.send_signal(signal.SIGUSR1)
        await_true(lambda: thread_state(target.pid) == "t", "the target's stop for the signal")
        os.kill(tracer, signal.SIGTERM)
        os.kill(tracer, signal.SIGCONT)
        client.communicate(timeout=TIMEOUT)
        await_true(lambda: not is_traced(target.pid), "the end of tracing")
        assert maps_of(target.pid) == before
        assert private_code_pages(target.pid, program) == 0
        assert ask(target) == str(int(SECOND_SUM) + 1)


def test_the_padding_is_left_as_it_was(build: Builder, run: Runner) -> None:
    program = build("slots.c")
    with waiting(program, "seccomp") as target:
        line = next(line for line in maps_of(target.pid).splitlines() if "r-xp" in line and str(program) in line)
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        memory = Path(f"/proc/{target.pid}/mem")

        def code() -> bytes:
            with memory.open("rb", buffering=0) as file:
                file.seek(start)
                return file.read(end - start)

        before = code()
        client, output = run.start(PROGRAM, ["-p", str(target.pid)])
        await_breakpoint(target.pid, program, SITES[-1])
        assert ask(target) == FIRST_SUM
        assert code() != before
        run.end(client, output)
        assert code() == before


def test_a_program_that_ends_its_hits_loses_its_copies_while_it_is_traced(build: Builder, run: Runner) -> None:
    program = build("slots.c")
    source = "name = slots\noffset = work_load\nmaxhits = 3\nexit\noffset = main\nminor = 1\nexit\n"
    with waiting(program, "plain") as target:
        client, output = run.start(source, ["-p", str(target.pid)])
        await_breakpoint(target.pid, program, "work_load")
        assert ask(target) == FIRST_SUM
        # Both breakpoints lie in one page: it is still needed.
        assert private_code_pages(target.pid, program) == 4
        result = run.end(client, output)
        assert result.counts[0].hits == 3
        await_true(lambda: not is_traced(target.pid), "the end of tracing")
        assert private_code_pages(target.pid, program) == 0

        client, output = run.start("name = slots\noffset = work_load\nmaxhits = 3\nexit\n", ["-p", str(target.pid)])
        await_breakpoint(target.pid, program, "work_load")
        client.send_signal(signal.SIGSTOP)  # it would end the run, which has no probepoint any more
        assert ask(target) == SECOND_SUM
        assert is_traced(target.pid)
        assert private_code_pages(target.pid, program) == 0
        client.send_signal(signal.SIGCONT)
        assert run.end(client, output).counts[0].hits == 3
