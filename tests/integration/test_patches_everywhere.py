"""``dprobes patch --everywhere``: all processes that map a file are patched, also later ones, and restored."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from dprobes.cli.verbs.patch import patch_command
from dprobes.engines import foreign_users
from dprobes.engines.foreign_users import ForeignUsers
from dprobes.engines.ptrace.patching import patch_symbols, patched_processes
from dprobes.engines.ptrace.patching.live_patches import insert_patch, plan_patch, remove_patch
from dprobes.engines.ptrace.patching.patch_records import listed_patches
from dprobes.engines.ptrace.patching.patched_processes import PatchedProcesses
from dprobes.engines.ptrace.tracer.thread_stopper import await_stop
from dprobes.errors import EngineError, TargetError
from dprobes.platform.linux import ptrace_calls
from dprobes.target.probed_module import Module
from dprobes.target.process_maps import mappings_of
from integration.support import DPROBES, TIMEOUT, await_line, children_of, code_is_original, environment, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dprobes.engines.ptrace.patching.live_patches import Inserted, PlannedPatch

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
    os.kill(child, signal.SIGKILL)


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
        (["fix.so:f"], "name a process (-p PID), or patch all processes that map the module (--everywhere)"),
        (
            ["fix.so:f", "-p", "1", "--everywhere"],
            "name a process (-p PID), or patch all processes that map the module",
        ),
        (["--list", "--everywhere", "--persist"], "--list takes no --persist"),
        (["fix.so:f", "--list", "-p", "1"], "--list takes no argument"),
        (["--remove", "--replace", "-p", "1", "--allow-write"], "--remove takes no --replace"),
    ],
    ids=["no module", "nothing", "both", "list persist", "list name", "remove replace"],
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


@pytest.fixture
def processes_of(shown: Path) -> PatchedProcesses:
    return PatchedProcesses(shown.parent / "two.so", "two", str(shown), "shown", None, replaces=False, idle=None)


def test_the_time_of_a_patch_is_not_charged_to_the_user(
    start: Callable[[], subprocess.Popen[str]], processes_of: PatchedProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock advances by an hour for each patch, and in the restoration at each look at it."""
    processes = [start(), start()]
    clock = [0.0]
    monkeypatch.setattr(foreign_users, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(foreign_users, "_owner_of_process", lambda _: "user 1000")

    def insert(planned: PlannedPatch, *, idle: float | None) -> Inserted:
        clock[0] += 3600
        return insert_patch(planned, idle=idle)

    monkeypatch.setattr(patched_processes, "insert_patch", insert)
    assert sorted(each.pid for each in processes_of.look() if each.inserted) == sorted(each.pid for each in processes)
    assert list(processes_of.notices()) == []

    def later() -> float:
        clock[0] += 3600
        return clock[0]

    monkeypatch.setattr(foreign_users, "time", SimpleNamespace(monotonic=later))
    list(processes_of.look())  # the user has no time left after the first process
    assert [notice.message[:45] for notice in processes_of.notices()] == [
        "what the processes of user 1000 map takes lon"
    ]
    assert processes_of.is_skipping
    assert processes_of.count == 2
    assert {(pid, error) for pid, _, error in processes_of.restore()} == {(each.pid, None) for each in processes}
    assert [ask(each) for each in processes] == ["1", "1"]


def test_skipped_processes_make_the_status_one(
    shown: Path,
    start: Callable[[], subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    process = start()
    clock = iter(range(0, 1 << 30, 3600))
    monkeypatch.setattr(foreign_users, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(foreign_users, "_owner_of_process", lambda pid: None if pid == process.pid else "user 1000")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        arguments = patch(shown, "--persist")[len(DPROBES) + 1 :]
        assert patch_command.main(arguments, standalone_mode=False) == 1
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert (
        "warning: what the processes of user 1000 map takes longer to look through than the 2 s that each user has"
    ) in capsys.readouterr().err
    assert ask(process) == "2"


def test_a_jump_that_is_gone_is_an_error(
    start: Callable[[], subprocess.Popen[str]], processes_of: PatchedProcesses
) -> None:
    process = start()
    (result,) = processes_of.look()
    assert result.inserted is not None
    assert remove_patch(process.pid, result.inserted.record)
    ((pid, _, error),) = processes_of.restore()
    assert pid == process.pid
    assert error is not None
    assert error.message == "'shown' no longer has the jump of the patch: nothing was restored"


def test_a_process_that_may_not_be_inspected_keeps_its_patch(
    start: Callable[[], subprocess.Popen[str]], processes_of: PatchedProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that sets PR_SET_DUMPABLE to 0 shows neither stack nor mappings to users without CAP_SYS_PTRACE."""
    process = start()
    assert [each.inserted is not None for each in processes_of.look()] == [True]

    def refuse(pid: int) -> object:
        raise TargetError(f"process {pid} may not be inspected") from PermissionError()

    def refuse_to_remove(pid: int, _: object) -> bool:
        raise EngineError(f"process {pid} may not be traced by this user")

    monkeypatch.setattr(patched_processes, "first_stack_of", lambda _: None)
    monkeypatch.setattr(patched_processes, "code_mappings", refuse)
    monkeypatch.setattr(patched_processes, "remove_patch", refuse_to_remove)
    assert list(processes_of.look()) == []
    assert processes_of.count == 1
    ((pid, _, error),) = processes_of.restore()
    assert pid == process.pid
    assert error is not None
    assert error.message == f"process {pid} may not be traced by this user"


def test_no_file_is_read_that_a_patch_does_not_need(
    shown: Path, start: Callable[[], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process can map any number of files."""
    process = start()
    read: list[Path] = []

    def load(path: Path, *, reached: Path) -> Module:
        read.append(path)
        return Module.load(path, reached=reached)

    monkeypatch.setattr(patch_symbols, "Module", SimpleNamespace(load=load))
    plan_patch(process.pid, shown.parent / "two.so", "two", f"{shown}:shown", None)
    assert read == [shown]


def library_user(shown: Path, called: str) -> Path:
    """Return an object that calls a function of libc."""
    source = f"unsigned long {called}(const char *); int two(void) {{ return {called}((char *)two); }}\n"
    (shown.parent / "uses.c").write_text(source)
    command = "gcc -O1 -shared -fPIC -nostartfiles -fno-builtin -w uses.c -o uses.so"
    subprocess.run(command.split(), cwd=shown.parent, check=True)
    return shown.parent / "uses.so"


def test_the_sum_of_the_sizes_of_read_files_is_limited(
    shown: Path, start: Callable[[], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start()
    path = library_user(shown, "atol")
    plan_patch(process.pid, path, "two", "shown", None)
    monkeypatch.setattr(patch_symbols, "_SIZES_MAX", 1 << 20)
    libc = next(each.path for each in mappings_of(process.pid) if "/libc.so" in each.path)
    with pytest.raises(TargetError) as caught:
        plan_patch(process.pid, path, "two", "shown", None)
    assert caught.value.message == (
        f"process {process.pid} maps code of files with more than the 1 MiB that are read: '{libc}' is not read"
    )
    assert caught.value.hint == "libraries are read until all symbols that the patch uses are found"


def test_the_number_of_searched_relocations_is_limited(
    shown: Path, start: Callable[[], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start()
    path = library_user(shown, "strlen")
    monkeypatch.setattr(patch_symbols, "_RELOCATIONS_MAX", 3)
    with pytest.raises(TargetError) as caught:
        plan_patch(process.pid, path, "two", "shown", None)
    assert caught.value.message == (
        f"process {process.pid} maps files with more than 3 relocations, in which the addresses of functions that are "
        "chosen at run time (IFUNC) are searched"
    )
    assert caught.value.hint == "do not call such functions, as of libc's memcpy and strlen, in the patch"


def test_files_of_other_users_are_limited(
    shown: Path,
    start: Callable[[], subprocess.Popen[str]],
    processes_of: PatchedProcesses,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The file is charged once for all processes; a refused one is told once, and tried again."""
    processes, may_have, asked = [start(), start()], [False], list[str]()

    def may_have_file(_: ForeignUsers, owner: str) -> bool:
        asked.append(owner)
        return may_have[0]

    monkeypatch.setattr(patch_symbols, "foreign_owner", lambda _: "user 1000")
    monkeypatch.setattr(ForeignUsers, "may_have_file", may_have_file)
    errors = [each.error.message for each in processes_of.look() if each.error is not None]
    assert errors == [f"'{shown}' is not read: too many files of user 1000 were read just now"] * 2
    assert list(processes_of.look()) == []
    may_have[0], asked[:] = True, []
    assert [each.inserted is not None for each in processes_of.look()] == [True, True]
    assert asked == ["user 1000"]
    assert [error for _, _, error in processes_of.restore()] == [None, None]
    assert [ask(each) for each in processes] == ["1", "1"]
