"""``dprobes patch --everywhere``: all processes that map a file are patched, also later ones, and restored."""

from __future__ import annotations

import re
import signal
import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ptrace.patching.patch_records import listed_patches
from dprobes.engines.ptrace.tracer.thread_stopper import await_stop
from dprobes.platform.linux import ptrace_calls
from integration.support import DPROBES, TIMEOUT, await_line, children_of, code_is_original, environment, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SHOWN = r"""
#include <stdio.h>
#include <unistd.h>
__attribute__((noinline, noclone)) int shown(void) { __asm__ volatile("nop; nop; nop; nop; nop"); return 1; }
int main(void)
{
	char line[9];
	do {
		if (line[0] == 'f' && !fork())
			for (;;) pause();
		printf("%d\n", shown());
		fflush(stdout);
	} while (fgets(line, sizeof line, stdin));
}
"""


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    """A program that nothing else on this machine executes, and an object beside it that makes it show 2."""
    (tmp_path / "shown.c").write_text(SHOWN.replace("char line[9]", "char line[9] = {0}"))
    (tmp_path / "two.c").write_text("int orig_shown(void);\nint two(void) { return orig_shown() + 1; }\n")
    for command in ("-O1 shown.c -o shown", "-O1 -shared -fPIC -nostartfiles two.c -o two.so"):
        subprocess.run(["gcc", *command.split()], cwd=tmp_path, check=True)
    return tmp_path / "shown"


@pytest.fixture
def start(shown: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    with ExitStack() as stack:

        def started() -> subprocess.Popen[str]:
            process = stack.enter_context(running(shown, stdin=subprocess.PIPE))
            assert await_line(process) == "1\n"
            return process

        yield started


def ask(process: subprocess.Popen[str], line: str = "") -> str:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return await_line(process).rstrip("\n")


def patch(shown: Path, *options: str) -> list[str]:
    return [*DPROBES, "patch", f"{shown.parent}/two.so:two={shown}:shown", "--everywhere", "--allow-write", *options]


def test_all_processes_are_patched_and_restored(shown: Path, start: Callable[[], subprocess.Popen[str]]) -> None:
    processes = [start(), start()]
    with running(*patch(shown), env=environment(), stderr=subprocess.PIPE) as tool:
        first = sorted(await_line(tool) for _ in processes)
        patterns = [
            rf"patched 'shown' of '{shown}' in process {each.pid}: 1 thread stopped for [\d.]+ ms(, at stop \d+)?; "
            r"28 KiB at 0x[0-9a-f]+ \(shown\)\n"
            for each in processes
        ]
        assert all(any(re.fullmatch(pattern, line) for line in first) for pattern in patterns), first
        assert [ask(each) for each in processes] == ["2", "2"]
        later = start()
        assert f"in process {later.pid}: " in await_line(tool)
        assert ask(later) == "2"
        assert ask(processes[0], "f") == "2"
        (child,) = children_of(processes[0].pid)
        assert await_line(tool) == f"process {child} (shown) has a copy of its parent's patch\n"
        tool.send_signal(signal.SIGINT)
        output, said = tool.communicate(timeout=TIMEOUT)
    everybody = [*(each.pid for each in (*processes, later)), child]
    assert sorted(int(re.findall(r"restored 'shown' in process (\d+);", line)[0]) for line in output.splitlines()) == (
        sorted(everybody)
    )
    assert tool.returncode == 0
    assert f"new processes that map '{shown}' are patched, too; Ctrl-C restores the function\n" in said
    assert [ask(each) for each in (*processes, later)] == ["1", "1", "1"]
    assert all(code_is_original(pid, shown) for pid in everybody)


def test_the_result_of_each_process_is_told(shown: Path, start: Callable[[], subprocess.Popen[str]]) -> None:
    free, traced = start(), start()
    ptrace_calls.seize(traced.pid, follow=False)
    try:
        command = patch(shown, "--persist")
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment(), check=False)
    finally:
        ptrace_calls.interrupt(traced.pid)
        await_stop(traced.pid)
        ptrace_calls.detach(traced.pid)
    assert done.returncode == 1
    assert f"in process {free.pid}: " in done.stdout
    assert f"warning: process {traced.pid} (shown) is not patched: process {traced.pid} is already traced by" in (
        done.stderr
    )
    assert done.stderr.endswith("dprobes: note: processes that start later are not patched\n")
    assert (ask(free), ask(traced)) == ("2", "1")


def test_patches_of_all_processes_are_listed_and_removed(
    shown: Path, start: Callable[[], subprocess.Popen[str]]
) -> None:
    processes = [start(), start()]
    subprocess.run(patch(shown, "--persist"), capture_output=True, timeout=TIMEOUT, env=environment(), check=True)
    listing = [*DPROBES, "patch", "--list", "--everywhere"]
    listed = subprocess.run(listing, capture_output=True, text=True, timeout=TIMEOUT, env=environment(), check=True)
    rows = [line.split() for line in listed.stdout.splitlines()]
    assert rows[0] == ["PID", "FUNCTION", "MODULE", "STATE", "PATCH", "KIB"]
    ours = sorted(str(each.pid) for each in processes)
    mine = [row for row in rows if row[0] in ours]
    assert sorted(mine) == [[pid, "shown", "shown", "active", f"{shown.parent}/two.so:two", "28"] for pid in ours]
    removing = [*DPROBES, "patch", "--remove", f"{shown.parent}/two.so:two", "--everywhere", "--allow-write"]
    subprocess.run(removing, capture_output=True, timeout=TIMEOUT, env=environment(), check=True)
    assert [ask(each) for each in processes] == ["1", "1"]
    assert [state.value for each in processes for _, state in listed_patches(each.pid)] == ["removed", "removed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fix.so:f", "--everywhere"], "--everywhere needs the module of the function: OBJECT:SYMBOL=MODULE:FUNCTION"),
        (["fix.so:f"], "expected a process, -p PID, or all that map the module, --everywhere"),
        (["fix.so:f", "-p", "1", "--everywhere"], "expected a process, -p PID, or all that map the module"),
    ],
    ids=["no module", "nothing", "both"],
)
def test_what_is_missing_is_told(arguments: list[str], message: str) -> None:
    command = [*DPROBES, "patch", *arguments, "--allow-write"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment(), check=False)
    assert done.returncode == 2
    assert f"Error: {message}" in done.stderr


def test_a_module_that_does_not_exist_is_refused() -> None:
    command = [*DPROBES, "patch", "fix.so:f=libnowhere.so.9:f", "--everywhere", "--allow-write"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment(), check=False)
    assert done.stderr == "dprobes: error: there is no module 'libnowhere.so.9' on this machine\n"
