"""Watchpoints on addresses of every process: programs for the kernel that name nothing in it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.platform.linux import perf_calls
from dprobes.platform.linux.procfs import online_cpus
from integration.ebpf.kernel import has_begun, require_bpf, require_initial_namespace
from integration.support import TIMEOUT, await_true, symbols_of

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Result, Runner

pytestmark = pytest.mark.usefixtures("debug_registers")

EBPF = ["--engine", "ebpf"]


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


def fixed(build: Builder, *, i386: bool = False) -> tuple[Path, dict[str, int]]:
    """Return a program that lies where it was linked, and its symbols."""
    program = build("watched.c", "-no-pie", name="fixed32" if i386 else "fixed", i386=i386)
    return program, symbols_of(program)


def watch(access: str, address: int, size: int = 8, minor: int = 1, body: str = "log 0\n", header: str = "") -> str:
    place = f"{address:#x}" if access == "x" else f"{address:#x}:{address + size - 1:#x}"
    return f"address = {place}\nwatchpoint = {access}\nminor = {minor}\n{header}{body}exit\n"


def in_kernel_mode(*definitions: str) -> str:
    return "name = vmlinux\nmodtype = kernel\n" + "".join(definitions)


def everywhere(run: Runner, source: str, *commands: list[object]) -> tuple[Result, list[str]]:
    """Run a program on all processes while commands run that were not started by dprobes."""
    client, output = run.start(source, [], EBPF)
    await_true(lambda: has_begun(client.pid), "the watchpoints")
    printed = [
        subprocess.run([str(w) for w in command], check=True, capture_output=True, text=True, timeout=TIMEOUT).stdout
        for command in commands
    ]
    return run.end(client, output), printed


def test_every_access_of_every_process_is_hit(build: Builder, run: Runner) -> None:
    program, symbols = fixed(build)
    source = in_kernel_mode(watch("w", symbols["cell"]), watch("rw", symbols["cell"], minor=2))
    result, printed = everywhere(
        run, source, [program, "threads", 200, 4], [program, "fork", 5], [program, "short", 10, 3]
    )
    writes, reads = (sum(numbers) for numbers in zip(*(map(int, text.split()) for text in printed), strict=True))
    assert {minor: count.hits for minor, count in result.counts.items()} == {1: writes, 2: writes + reads}
    assert len(result.records) == 2 * writes + reads
    assert len({record["pid"] for record in result.records}) == 2 + 5


@pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb is not installed")
def test_counts_agree_with_those_of_gdb(build: Builder, run: Runner) -> None:
    program, symbols = fixed(build)
    commands = ["break main", "run", "awatch -l cell", "ignore 2 1000000", "continue", "info watchpoints"]
    arguments = [part for command in commands for part in ("-ex", command)]
    text = subprocess.run(
        ["gdb", "-nx", "-batch", *arguments, "--args", str(program), "threads", "25", "8"],
        check=True,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    ).stdout
    found = re.search(r"acc watchpoint .*\n\s+breakpoint already hit (\d+) times", text)
    assert found, text
    result, _ = everywhere(run, in_kernel_mode(watch("rw", symbols["cell"])), [program, "threads", 25, 8])
    assert result.counts[1].hits == int(found[1]) == 400


def test_what_a_handler_sees_is_the_state_after_the_access(build: Builder, run: Runner) -> None:
    program, symbols = fixed(build)
    body = f"push {symbols['cell']:#x}\npush mem, u64\npush r, eip\nlog 2\n"
    source = in_kernel_mode(
        watch("w", symbols["cell"], body=body), watch("x", symbols["put"], minor=2, body="push r, arg0\nlog 1\n")
    )
    result, _ = everywhere(run, source, [program, "threads", 5, 1])
    listing = subprocess.run(
        ["objdump", "-d", "--disassemble=put", str(program)], check=True, capture_output=True, text=True
    ).stdout
    after = int(re.findall(r"^ +([0-9a-f]+):", listing, re.MULTILINE)[1], 16)
    assert result.words(1) == [[after, n] for n in range(5)]
    assert {record["ip"] for record in result.records if record["minor"] == 2} == {symbols["put"]}
    assert result.words(2) == [[n] for n in range(5)]
    assert result.counts[1].executed == "debug register"


def test_programs_of_both_word_sizes_have_one_count(build: Builder, run: Runner) -> None:
    (program, symbols), (narrow, symbols_32) = fixed(build), fixed(build, i386=True)
    body = "push r, esp\nlog 1\n"
    source = in_kernel_mode(
        watch("w", symbols["cell"], 4, 1, body), watch("w", symbols_32["cell"], 4, 2, body, "maxhits = 6\n")
    )
    result, _ = everywhere(run, source, [program, "fork", 4], [narrow, "fork", 3], [narrow, "threads", 5, 2])
    assert {minor: count.hits for minor, count in result.counts.items()} == {1: 4, 2: 6}
    assert {len(record["data"]) for record in result.records if record["minor"] == 1} == {16}
    assert {len(record["data"]) for record in result.records if record["minor"] == 2} == {8}


def test_a_handler_that_is_none_for_i386_serves_the_others(build: Builder, run: Runner) -> None:
    (program, symbols), (narrow, symbols_32) = fixed(build), fixed(build, i386=True)
    body = "push r, r8\nlog 1\n"
    source = in_kernel_mode(watch("w", symbols["cell"], 4, 1, body), watch("w", symbols_32["cell"], 4, 2, body))
    result, _ = everywhere(run, source, [program, "put"], [narrow, "put"])
    assert {minor: count.hits for minor, count in result.counts.items()} == {1: 1, 2: 0}
    assert "warning: the program cannot be inserted into i386 processes\n" in result.stderr
    assert ":6:9: error: i386 has no register 'r8'" in result.stderr


def test_a_scope_is_kept(build: Builder, run: Runner) -> None:
    program, symbols = fixed(build)
    source = in_kernel_mode(watch("w", symbols["cell"]))
    subject = ["sh", "-c", f"{program} put; {program} exec 3"]
    client, output = run.start(source, ["--exit-status", "--", *subject], EBPF)
    while client.poll() is None:
        subprocess.run([program, "put"], check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT)
    result = run.end(client, output)
    assert (result.status, result.counts[1].hits) == (0, 4)


def test_registers_that_others_have_are_left_to_them(build: Builder, run: Runner) -> None:
    program, symbols = fixed(build)
    source = in_kernel_mode(*(watch("w", symbols["cell"], minor=n) for n in (1,)))
    with contextlib.ExitStack() as taken:
        for slot in range(4):
            event = perf_calls.open_breakpoint(
                symbols["bytes"] + 8 * slot, 8, perf_calls.Access.WRITE, cpu=online_cpus()[-1]
            )
            taken.callback(os.close, event)
        result = run(source, ["--", str(program), "put"], EBPF)
    assert (result.status, result.stdout) == (1, "")
    assert result.stderr == (
        "dprobes: error: no probepoint can be inserted, so the command was not started: "
        "DEBUGREG_UNAVAIL: all debug registers of a CPU are in use\n"
    )


def test_what_engine_auto_takes(build: Builder, run: Runner) -> None:
    program, symbols = fixed(build)
    source = in_kernel_mode(watch("w", symbols["cell"]))
    result = run(source, ["--", str(program), "fork", "3"], ["--engine", "auto", "-v"])
    assert "note: engine ebpf: " in result.stderr
    assert result.counts[1].hits == 3
