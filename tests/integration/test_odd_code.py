"""Programs that copy or move their own code, make children that nobody may trace, or run code of another word size."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.platform.linux import ptrace_calls
from dprobes.platform.x86.debug_registers import CONTROL, Watch, control_bits
from dprobes.rpn.rpn_program import Access
from integration.support import TIMEOUT, await_breakpoint, await_line, read_result, running

if TYPE_CHECKING:
    from integration.support import Builder, Runner

WORK = "name = oddcode\noffset = work\nminor = 1\npush 1\nlog 1\nexit\n"


def test_a_copy_of_probed_code_is_executed_without_the_breakpoint(build: Builder, run: Runner) -> None:
    result = run.command(WORK, build("oddcode.c", "-no-pie"), "copy")
    assert result.counts[1].hits == 1


def test_probed_code_that_is_moved_is_probed_where_it_is(build: Builder, run: Runner) -> None:
    result = run.command(WORK, build("oddcode.c", "-no-pie"), "move")
    assert result.counts[1].hits == 3


def test_a_child_that_nobody_may_trace_ends_at_a_breakpoint_and_its_parent_goes_on(build: Builder, run: Runner) -> None:
    # The kernel tells no tracer of such a child; docs/reference/engine-ptrace.md says so.
    result = run.command(WORK, build("oddcode.c", "-no-pie"), "untraced")
    assert result.stdout == f"child {signal.SIGTRAP}\n"
    assert result.counts[1].hits == 2


def test_narrow_code_in_a_wide_program_is_executed_as_it_is(build: Builder, run: Runner) -> None:
    program = build("oddcode.c", "-no-pie")
    result = run.command("name = oddcode\noffset = narrow\nminor = 1\npush 1\nlog 1\nexit\n", program, "compat")
    assert result.counts[1].hits == 0
    assert " executes 32-bit code at offset 0x" in result.stderr
    assert " of a 64-bit module: that is not a hit\n" in result.stderr
    assert "hint: only code of the file's own word size can be probed\n" in result.stderr


@pytest.mark.parametrize("places", [("narrow",), ("narrow", "call_narrow", "main")], ids=["one", "several"])
@pytest.mark.parametrize("engine", ["ptrace", "inline"])
def test_narrow_code_is_executed_as_it_is_where_a_jump_stands(
    build: Builder, run: Runner, engine: str, places: tuple[str, ...]
) -> None:
    program = build("narrow.c", "-no-pie", "-fno-pie")
    probes = "".join(f"offset = {place}\nminor = {number}\nabort\n" for number, place in enumerate(places))
    result = run(f"name = narrow\n{probes}", ["--exit-status", "--", str(program), "300"], ["--engine", engine])
    assert (result.status, result.stdout) == (0, "right\n"), result.stderr
    assert result.counts[0].hits == 0
    assert [result.counts[number].hits for number in range(1, len(places))] == [300, 1][: len(places) - 1]


def test_code_in_the_last_page_of_user_space_is_probed(build: Builder, run: Runner) -> None:
    program = build("oddcode.c", "-no-pie")
    with running(program, "top", stdin=subprocess.PIPE) as target:
        assert await_line(target) == "0x7fffffffe000\n"
        # The last instruction but one is executed out of line.
        source = WORK + "offset = work + 7\nminor = 2\nmaxhits = 9\nexit\n"
        process, output = run.start(source, ["-p", str(target.pid)])
        await_breakpoint(target.pid, program, "work")
        assert target.stdin is not None
        target.stdin.write("\n")
        target.stdin.flush()
        assert target.wait(TIMEOUT) == 0
        result = read_result(process, output)
    assert [result.counts[minor].hits for minor in (1, 2)] == [3, 3]


def watch(pid: int, address: int) -> None:
    """Leave a watchpoint for reads and writes of 4 bytes in a process, as a debugger does that is killed."""
    ptrace_calls.seize(pid, follow=False)
    ptrace_calls.interrupt(pid)
    os.waitpid(pid, ptrace_calls.WALL)
    watched = Watch(address, 4, Access.READ_WRITE)
    ptrace_calls.set_debug_register(pid, 0, address)
    ptrace_calls.set_debug_register(pid, CONTROL, control_bits(0, watched))
    ptrace_calls.detach(pid)


@pytest.mark.parametrize("is_probed", [False, True])
def test_the_watchpoint_of_a_debugger_on_a_probed_load_traps_right_behind_it(
    build: Builder, run: Runner, *, is_probed: bool
) -> None:
    program = build("oddcode.c", "-no-pie")
    with running(program, "watched", stdin=subprocess.PIPE) as target:
        watch(target.pid, int(await_line(target), 16))
        assert target.stdin is not None
        if is_probed:
            source = "name = oddcode\noffset = loads\nminor = 1\nmaxhits = 9\npush 1\nlog 1\nexit\n"
            source += "offset = loads + 7\nminor = 2\npush 1\nlog 1\nexit\n"
            process, output = run.start(source, ["-p", str(target.pid)])
            await_breakpoint(target.pid, program, "loads")
        target.stdin.write("\n")
        target.stdin.flush()
        # Six loads, six traps; none anywhere else.
        assert await_line(target) == "6 0\n"
        assert target.wait(TIMEOUT) == 0
        if is_probed:
            result = read_result(process, output)
            assert [result.counts[minor].hits for minor in (1, 2)] == [3, 3]
