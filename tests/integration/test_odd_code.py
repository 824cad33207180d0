"""Programs that copy or move their own code, make children that nobody may trace, or run code of another word size."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

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
    # The kernel tells no tracer of such a child; docs/engines.md says so.
    result = run.command(WORK, build("oddcode.c", "-no-pie"), "untraced")
    assert result.stdout == f"child {signal.SIGTRAP}\n"
    assert result.counts[1].hits == 2


def test_narrow_code_in_a_wide_program_is_executed_as_it_is(build: Builder, run: Runner) -> None:
    program = build("oddcode.c", "-no-pie")
    result = run.command("name = oddcode\noffset = narrow\nminor = 1\npush 1\nlog 1\nexit\n", program, "compat")
    assert result.counts[1].hits == 0
    assert " executes 32-bit code at offset 0x" in result.stderr
    assert " of a 64-bit module: that is no hit\n" in result.stderr
    assert "hint: only code of the file's own word size can be probed\n" in result.stderr
