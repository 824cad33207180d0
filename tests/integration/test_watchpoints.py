"""Watchpoints of real programs: counts, threads, processes, and registers that are clean when we are gone."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.platform.linux import ptrace_calls
from integration.support import (
    TIMEOUT,
    await_breakpoint,
    await_line,
    await_message,
    await_traced,
    await_true,
    code_is_original,
    is_traced,
    load_bias,
    read_result,
    running,
    symbols_of,
    tracer_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.support import Builder, Counts, Runner


pytestmark = pytest.mark.usefixtures("debug_registers")


def watch(
    access: str, place: str = "cell:cell+7", minor: int = 1, body: str = "push 1\nlog 1\n", header: str = ""
) -> str:
    return f"address = {place}\nwatchpoint = {access}\nminor = {minor}\n{header}{body}exit\n"


WRITES = "name = watched\n" + watch("w")
BOTH = WRITES + watch("rw", minor=2)


def hits(counts: dict[int, Counts]) -> dict[int, int]:
    for count in counts.values():
        assert count.hits == count.records + count.passed
        assert count.lost == 0
    return {minor: count.hits for minor, count in counts.items()}


def test_every_access_of_eight_threads_is_hit(build: Builder, run: Runner) -> None:
    result = run.command(BOTH, build("watched.c"), "threads", 60, 8)
    assert result.stdout == "480 480\n"
    assert hits(result.counts) == {1: 480, 2: 960}


def test_threads_that_live_for_one_access_are_watched(build: Builder, run: Runner) -> None:
    result = run.command(BOTH, build("watched.c"), "short", 30, 4)
    assert hits(result.counts) == {1: 120, 2: 240}


@pytest.mark.parametrize("way", ["fork", "vfork", "spawn", "exec"])
@pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])
def test_processes_that_are_born_later_are_watched(build: Builder, run: Runner, way: str, i386: bool) -> None:
    source = "name = watched\n" + watch("w", "cell:cell+3")
    result = run.command(source, build("watched.c", i386=i386), way, 5)
    assert hits(result.counts) == {1: 5}
    assert len({record["pid"] for record in result.records}) == 5


def test_an_i386_program_of_threads(build: Builder, run: Runner) -> None:
    source = "name = watched\n" + watch("w", "cell:cell+3") + watch("rw", "cell:cell+3", 2)
    result = run.command(source, build("watched.c", i386=True), "threads", 60, 4)
    assert hits(result.counts) == {1: 240, 2: 480}


@pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb is not installed")
def test_counts_agree_with_those_of_gdb(build: Builder, run: Runner) -> None:
    program = build("watched.c")
    # gdb's watch overlooks a write that changes nothing, its awatch does not.
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
    source = "name = watched\n" + watch("rw")
    assert hits(run.command(source, program, "threads", 25, 8).counts) == {1: int(found.group(1))} == {1: 400}


def test_a_data_watchpoint_shows_the_state_after_the_access(build: Builder, run: Runner) -> None:
    program = build("watched.c")
    body = "push cell\npush mem, u64\npush put\npush r, eip\nsub\nlog 2\n"
    source = "name = watched\n" + watch("w", body=body) + "offset = get\nminor = 2\npush 1\nlog 1\nexit\n"
    result = run.command(source, program, "threads", 5, 1)
    listing = subprocess.run(
        ["objdump", "-d", "--disassemble=put", str(program)], check=True, capture_output=True, text=True
    ).stdout
    second = re.findall(r"^ +([0-9a-f]+):", listing, re.MULTILINE)[1]
    after = int(second, 16) - symbols_of(program)["put"]
    assert sorted(result.words(1)) == [[after, n] for n in range(5)]
    assert hits(result.counts) == {1: 5, 2: 5}
    bias = {record["ip"] - after - symbols_of(program)["put"] for record in result.records if record["minor"] == 1}
    assert len(bias) == 1
    assert bias.pop() % 4096 == 0


def test_an_execute_watchpoint_is_hit_before_the_instruction_and_does_not_repeat(build: Builder, run: Runner) -> None:
    source = "name = watched\n" + watch("x", "put", body="push r, edi\npush put\npush r, eip\nsub\nlog 2\n")
    source += watch("x", "get", minor=2) + "offset = put\nminor = 3\npush 1\nlog 1\nexit\n"
    result = run.command(source, build("watched.c"), "threads", 20, 4)
    assert hits(result.counts) == {1: 80, 2: 80, 3: 80}
    assert sorted(result.words(1)) == sorted([0, n] for n in range(20) for _ in range(4))


def test_ranges_are_hit_by_whatever_touches_one_of_their_bytes(build: Builder, run: Runner) -> None:
    source = "name = watched\n" + watch("w", "bytes:bytes+7") + watch("w", "bytes+10:bytes+11", 2)
    source += watch("w", "bytes+20:bytes+23", 3) + watch("w", "bytes+31", 4)
    result = run.command(source, build("watched.c"), "parts")
    # Every byte once, and all of them in four pieces of eight.
    assert hits(result.counts) == {1: 9, 2: 3, 3: 5, 4: 2}


def test_a_repeated_string_instruction_hits_once_for_each_element(build: Builder, run: Runner) -> None:
    source = "name = watched\n" + watch("w", "bytes+8:bytes+15", body="push r, ecx\nlog 1\n")
    probed = source + "offset = copy\nminor = 2\npush 1\nlog 1\nexit\n"
    for program, counts in ((source, {1: 8}), (probed, {1: 8, 2: 1})):
        result = run.command(program, build("watched.c"), "string")
        assert hits(result.counts) == counts
        assert result.words(1) == [[n] for n in range(23, 15, -1)]


def test_accesses_of_the_kernel_are_not_seen(build: Builder, run: Runner) -> None:
    assert hits(run.command(BOTH, build("watched.c"), "kernel", 20).counts) == {1: 0, 2: 0}


@pytest.mark.parametrize("probed", [False, True], ids=["free", "probed"])
def test_instructions_under_a_breakpoint_hit_as_well(build: Builder, run: Runner, probed: bool) -> None:
    source = "name = watched\n" + watch("w") + watch("rw", minor=2) + watch("x", "popping", 3)
    if probed:
        source += "".join(
            f"offset = {name}\nminor = {n}\npush 1\nlog 1\nexit\n" for n, name in ((4, "pushing"), (5, "popping"))
        )
    result = run.command(source, build("watched.c"), "stack", 20)
    # The program itself reads it once more at the end.
    assert hits(result.counts) == {1: 20, 2: 41, 3: 20, **({4: 20, 5: 20} if probed else {})}
    if probed:
        first = [record["minor"] for record in result.records][:6]
        assert first == [4, 1, 2, 3, 5, 2]


def test_the_signals_of_the_program_are_its_own(build: Builder, run: Runner) -> None:
    result = run.command(WRITES, build("watched.c"), "signals", 30)
    assert result.stdout == "30 0\n"
    assert hits(result.counts) == {1: 30}


def test_passcount_maxhits_and_remove(build: Builder, run: Runner) -> None:
    source = "name = watched\n" + watch("w", header="passcount = 10\nmaxhits = 5\n")
    source += watch("rw", minor=2, header="maxhits = 7\n") + watch("x", "put", 3, "push 1\nlog 1\nremove\n")
    result = run.command(source, build("watched.c"), "threads", 30, 8)
    assert result.stdout == "240 240\n"
    assert hits(result.counts) == {1: 15, 2: 7, 3: 1}
    assert (result.counts[1].passed, result.counts[1].records) == (10, 5)


@pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb is not installed")
@pytest.mark.parametrize("access", ["x", "w"])
def test_a_debugger_takes_over_at_a_watchpoint(build: Builder, run: Runner, access: str) -> None:
    place, expected = ("put", "put 0\n") if access == "x" else ("cell:cell+7", "put 7\n")
    source = "name = watched\n" + watch(access, place, body="push 1\nlog 1\nexit 1\n")
    look = "-ex 'handle SIGSTOP nostop noprint nopass' -ex 'printf \"put %d\\n\", (int)((long)$pc - (long)&put)'"
    debugger = f"gdb -p %p -nx -batch -ex 'set pagination off' {look}"
    options = ["--allow-write", "--debugger", debugger]
    result = run.command(source, build("watched.c"), "put", options=options)
    assert expected in result.stdout
    assert "1 0\n" in result.stdout
    assert hits(result.counts) == {1: 1}


def test_a_handler_may_write(build: Builder, run: Runner) -> None:
    # put(n) stores n + 100 instead, and what it stored becomes n again.
    source = "name = watched\n" + watch("x", "put", 1, "push r, edi\npush 100\nadd\npop r, edi\n")
    source += watch("w", minor=2, body="push cell\npush mem, u64\nlog 1\n")
    result = run.command(source, build("watched.c"), "threads", 10, 1, options=["--allow-write"])
    assert result.stdout == "10 0\n"
    assert result.words(2) == [[100 + n] for n in range(10)]


def test_a_library_that_is_loaded_again_and_again(build: Builder, run: Runner) -> None:
    library = build("plugin.c", "-shared", "-fPIC", name="libplugin.so")
    source = 'name = "libplugin.so"\n' + watch("w", "calls:calls+3")
    result = run.command(source, build("watched.c", "-ldl"), "library", 20, library)
    # The constructor writes as well.
    assert hits(result.counts) == {1: 3 * 21}


def test_a_number_is_an_address_in_the_process(build: Builder, run: Runner) -> None:
    program = build("watched.c", "-no-pie", name="fixed")
    address = symbols_of(program)["cell"]
    source = "name = fixed\n" + watch("w", f"{address:#x}:{address + 7:#x}")
    assert hits(run.command(source, program, "threads", 10, 2).counts) == {1: 20}


def test_an_address_that_no_program_can_have(build: Builder, run: Runner) -> None:
    source = WRITES + watch("w", "0xffffffff81000000", 2)
    result = run.command(source, build("watched.c"), "put")
    assert hits(result.counts) == {1: 1, 2: 0}
    assert re.search(
        r"INVALID_OFFSET in process \d+: no program can have the address 0xffffffff81000000", result.stderr
    )


def test_more_than_four(build: Builder, run: Runner) -> None:
    source = "name = watched\n" + "".join(watch("rw", f"bytes+{n}", n) for n in range(1, 6))
    result = run.command(source, build("watched.c"), "parts")
    assert hits(result.counts) == {1: 2, 2: 2, 3: 2, 4: 2, 5: 0}
    message = "DEBUGREG_UNAVAIL: the processor has 4 debug registers, and 4 watchpoints come before this one"
    assert f"{message}; not inserted\n    address = bytes+5\n" in result.stderr


def test_lengths_and_alignments_that_the_processor_lacks(build: Builder, run: Runner) -> None:
    source = WRITES + watch("rw", "bytes:bytes+2", 2) + watch("rw", "bytes+2:bytes+5", 3) + watch("x", "put:put+1", 4)
    result = run.command(source, build("watched.c"), "put")
    assert hits(result.counts) == {1: 1, 2: 0, 3: 0, 4: 0}
    program = build("watched.c")
    at, put = symbols_of(program)["bytes"], symbols_of(program)["put"]
    state = "warning: WATCHPOINT_LEN_INVALID:"
    for message, hint in (
        (f"3 bytes at {at:#x}, but the processor watches 1, 2, 4 or 8 bytes", "bytes : bytes + 0x3"),
        (
            f"4 bytes at {at + 2:#x}, but the processor watches 4 bytes only at multiples of 4",
            "bytes : bytes + 0x7",
        ),
        (
            f"2 bytes at {put:#x}, but an execute watchpoint is one byte long, the first one of the instruction",
            "put",
        ),
    ):
        assert f"{state} {message}; not inserted\n" in result.stderr
        assert f"hint: write 'address = {hint}'\n" in result.stderr


# Debug registers that others have left behind


@contextlib.contextmanager
def waiting_program(build: Builder) -> Iterator[subprocess.Popen[str]]:
    with running(build("watched.c"), "wait", stdin=subprocess.PIPE) as target:
        assert await_line(target).startswith("ready")
        yield target


def access(target: subprocess.Popen[str]) -> None:
    """Let the program write to its cell once; it survives that."""
    assert target.stdin is not None
    target.stdin.write("x")
    target.stdin.flush()
    assert await_line(target) == "done\n"


def leave_behind(pid: int, addresses: list[int]) -> None:
    """Do what a debugger does that detaches without clearing the debug registers."""
    ptrace_calls.seize(pid)
    ptrace_calls.interrupt(pid)
    os.waitpid(pid, ptrace_calls.WALL)
    control = 0
    for slot, address in enumerate(addresses):
        ptrace_calls.set_debug_register(pid, slot, address)
        control |= 0b1101 << 16 + 4 * slot | 1 << 2 * slot
    ptrace_calls.set_debug_register(pid, 7, control)
    ptrace_calls.detach(pid)


def debug_registers(pid: int) -> list[int]:
    ptrace_calls.seize(pid)
    ptrace_calls.interrupt(pid)
    os.waitpid(pid, ptrace_calls.WALL)
    try:
        return [ptrace_calls.get_debug_register(pid, number) for number in (0, 1, 2, 3, 7)]
    finally:
        ptrace_calls.detach(pid)


def test_free_registers_are_used_and_others_left_alone(build: Builder, run: Runner) -> None:
    program = build("watched.c")
    with waiting_program(build) as target:
        place = load_bias(target.pid, program) + symbols_of(program)["bytes"]
        left = [place, place + 4, place + 8]
        leave_behind(target.pid, left)
        before = debug_registers(target.pid)
        process, output = run.start(
            "name = watched\n" + watch("rw") + watch("rw", "bytes+20", 2), ["-p", str(target.pid)]
        )
        await_traced(target.pid)
        assert process.stderr is not None
        await_message(process, "DEBUGREG_UNAVAIL")
        access(target)
        await_true(lambda: output.exists() and output.read_text().count("\n") == 1, "a record")
        process.send_signal(signal.SIGINT)
        assert hits(read_result(process, output).counts) == {1: 1, 2: 0}
        after = debug_registers(target.pid)
        assert (after[:3], after[4]) == (left, before[4])
        access(target)


def test_no_register_is_free(build: Builder, run: Runner) -> None:
    program = build("watched.c")
    with waiting_program(build) as target:
        place = load_bias(target.pid, program) + symbols_of(program)["bytes"]
        leave_behind(target.pid, [place, place + 4, place + 8, place + 12])
        before = debug_registers(target.pid)
        process, output = run.start("name = watched\n" + watch("rw"), ["-p", str(target.pid)])
        assert process.stderr is not None
        line = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        result = read_result(process, output)
        assert line == (
            f"dprobes: warning: DEBUGREG_UNAVAIL in process {target.pid}: another debugger has left the debug "
            f"registers of thread {target.pid} in use; not inserted there\n"
        )
        assert result.status == 1
        assert "no probepoint was inserted" in result.stderr
        assert debug_registers(target.pid) == before
        access(target)


# Ways out


SHOWN = BOTH + "offset = get\nminor = 3\nexit\n"
"""Has a breakpoint besides, which shows from outside."""


def await_armed(pid: int, program: Path) -> int:
    """Wait until the breakpoint of ``SHOWN`` is there: then no thread runs before it is armed as well."""
    await_breakpoint(pid, program, "get")
    return tracer_of(pid)


@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_registers_are_cleared_when_we_go(build: Builder, run: Runner, way: int) -> None:
    with waiting_program(build) as target:
        process, output = run.start(SHOWN, ["-p", str(target.pid)])
        await_armed(target.pid, build("watched.c"))
        access(target)
        await_true(lambda: output.exists() and output.read_text().count("\n") == 2, "records")
        process.send_signal(way)
        process.communicate(timeout=TIMEOUT)
        await_true(lambda: not is_traced(target.pid), "the end of tracing")
        assert debug_registers(target.pid)[4] == 0
        access(target)


def test_registers_are_cleared_when_the_tracer_is_killed(build: Builder, run: Runner) -> None:
    with waiting_program(build) as target:
        process, output = run.start(SHOWN, ["-p", str(target.pid)])
        tracer = await_armed(target.pid, build("watched.c"))
        access(target)
        await_true(lambda: output.exists() and output.read_text().count("\n") == 2, "records")
        os.kill(tracer, signal.SIGKILL)
        result = read_result(process, output)
        assert result.status == 1
        assert "the debug registers of 1 thread were cleared from outside" in result.stderr
        assert "2 breakpoints (the engine's own included) were removed from outside" in result.stderr
        assert not is_traced(target.pid)
        assert debug_registers(target.pid)[4] == 0
        access(target)


def test_a_hot_target_survives_ways_out_while_it_is_watched(build: Builder, run: Runner) -> None:
    program = build("watched.c")
    with running(program, "spin", 50, 4, 12) as target:
        await_line(target)
        for way in (signal.SIGINT, signal.SIGKILL, signal.SIGTERM):
            process, output = run.start(BOTH, ["-p", str(target.pid)])
            await_traced(target.pid)
            await_true(lambda output=output: output.exists() and output.stat().st_size > 0, "records")  # type: ignore[misc]
            process.send_signal(way)
            _, stderr = process.communicate(timeout=TIMEOUT)
            assert "Traceback" not in stderr, stderr
            await_true(lambda: not is_traced(target.pid), "the end of tracing")
            assert target.poll() is None
            assert code_is_original(target.pid, program)
        assert target.wait(TIMEOUT) == 0
