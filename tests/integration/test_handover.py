"""``exit 1`` and ``remove``: a process is handed over to a real debugger or left stopped, and goes on unharmed."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from integration.support import (
    DPROBES,
    TIMEOUT,
    await_line,
    await_traced,
    await_true,
    children_of,
    code_is_original,
    environment,
    is_traced,
    kernel_state,
    memory_at,
    read_result,
    running,
    tracer_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner

TURN = "name = handover\noffset = turn\nminor = 1\npush r, pc\nlog 1\nexit 1\n"
TICK = "offset = tick\nminor = 2\npush tid\nlog 1\nexit\n"
TURN_BYTES = "0xb8	0x87	0xd6	0x12	0x00	0x90"
GDB = (
    "gdb -p %p -nx -batch -ex 'set pagination off' -ex 'printf \"pc=%#lx eax=%d\\n\", (unsigned long)$pc, $eax' "
    "-ex 'x/6xb $pc' -ex 'info threads' -ex bt"
)


def gdb_with(*commands: str) -> str:
    return GDB.replace("%#", "%%#").replace("%d", "%%d") + "".join(f" -ex '{command}'" for command in commands)


def only_in(pid: int) -> str:
    """Return the beginning of a handler for one process of a tree."""
    return f"push pid\npush {pid}\nsub\njz this\nabort\nthis: "


def stopped_process(stderr: str) -> int:
    found = re.search(r"process (\d+) \(handover\) is stopped at 0x[0-9a-f]+, before the probed instruction", stderr)
    assert found, stderr
    return int(found[1])


@pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])
def test_gdb_sees_the_process_as_it_was_at_the_hit(build: Builder, run: Runner, i386: bool) -> None:
    program = build("handover.c", i386=i386)
    result = run(
        TURN + TICK,
        ["--exit-status", "--", str(program), "3", "3000"],
        ["--allow-write", "--debugger", gdb_with()],
    )
    assert result.status == 0, result.stdout + result.stderr
    _, turn, *_ = next(line for line in result.stdout.splitlines() if line.count(" 0x") == 4).split()
    assert f"pc={turn} " in result.stdout
    assert f"<turn>:\t{TURN_BYTES}" in result.stdout
    assert re.search(r"#0 .* in turn \(\)\n#1 .* in outer .*\n(#[234] .*\n)+#5 .* in main ", result.stdout)
    assert "\n9000 0\n" in result.stdout  # no call was lost
    (record,) = [r for r in result.records if r["minor"] == 1]
    assert int(turn, 16) == record["ip"]
    assert result.counts[1].hits == result.counts[1].records == 1
    assert result.counts[2].hits == result.counts[2].records <= 9000
    assert "the debugger" not in result.stderr
    assert "Traceback" not in result.stderr


def test_the_debugger_can_let_the_process_run_and_stop_it_again(build: Builder, run: Runner) -> None:
    program = build("handover.c")
    debugger = gdb_with(
        "handle SIGSTOP nostop noprint nopass", "stepi", "print $eax", "break pthread_join", "continue", "delete"
    )
    result = run(TURN, ["--exit-status", "--", str(program), "1", "9"], ["--allow-write", "--debugger", debugger])
    assert "$1 = 1234567\n" in result.stdout
    assert re.search(r"Breakpoint 1, .*pthread_join", result.stdout)
    assert result.status == 0, result.stdout + result.stderr


def test_signals_sent_meanwhile_are_not_lost(build: Builder, run: Runner) -> None:
    program = build("handover.c")
    real_time = signal.SIGRTMIN
    debugger = f"sh -c 'for n in 1 2 3 4 5 6 7; do kill -{real_time} %p; done; gdb -p %p -nx -batch -ex bt'"
    result = run(
        TURN + TICK, ["--exit-status", "--", str(program), "3", "3000"], ["--allow-write", "--debugger", debugger]
    )
    assert result.status == 0, result.stdout + result.stderr
    assert "\n9000 7\n" in result.stdout


def test_without_a_debugger_the_process_is_left_stopped(build: Builder, run: Runner) -> None:
    program = build("handover.c")
    process, output = run.start(TURN + TICK, ["--exit-status", "--", str(program), "2", "3000"], ["--allow-write"])
    assert process.stderr is not None
    line = process.stderr.readline()
    pid = stopped_process(line)
    hint = process.stderr.readline()
    assert hint == f"hint: examine it with 'gdb -p {pid}', then continue it with 'kill -CONT {pid}'\n"
    await_true(lambda: kernel_state(pid) == "T", "the stop")
    assert not is_traced(pid)
    assert code_is_original(pid, program)
    os.kill(pid, signal.SIGCONT)
    result = read_result(process, output)
    assert result.status == 0, result.stderr
    assert result.stdout.endswith("\n6000 0\n")


def test_an_attached_process_is_left_stopped_and_the_run_ends(build: Builder, run: Runner) -> None:
    program = build("torture.c")
    with running(program, 600, 3) as target:
        await_line(target)
        source = f"name = torture\noffset = stepped\npasscount = 500\nminor = 1\n{only_in(target.pid)}exit 1\n"
        result = run(source, ["-p", str(target.pid)], ["--allow-write"])
        assert result.status == 0, result.stderr
        assert result.counts[1].hits > 500
        assert f"process {target.pid} (torture) is stopped at " in result.stderr
        await_true(lambda: kernel_state(target.pid) == "T", "the stop")
        assert not is_traced(target.pid)
        assert code_is_original(target.pid, program)
        target.send_signal(signal.SIGUSR2)
        target.send_signal(signal.SIGCONT)
        assert target.wait(TIMEOUT) == 0


def test_a_hot_target_survives_being_handed_over_again_and_again(build: Builder, run: Runner) -> None:
    program = build("torture.c")
    with running(program, 600, 3) as target:
        await_line(target)
        for number in range(5):
            place = "stepped" if number % 2 else "emulated"
            limit = f"passcount = {37 * number}\n"
            source = f"name = torture\noffset = {place}\n{limit}minor = 1\n{only_in(target.pid)}exit 1\n"
            result = run(source, ["-p", str(target.pid)], ["--allow-write", "--debugger", "true %p"])
            assert result.status == 0, result.stderr
            assert target.poll() is None, f"the target died in round {number}"
            assert not is_traced(target.pid)
            assert code_is_original(target.pid, program)
        target.send_signal(signal.SIGUSR2)
        assert target.wait(TIMEOUT) == 0


def test_the_other_processes_of_the_tree_stay_probed(build: Builder, run: Runner) -> None:
    program = build("handover.c")
    script = f"{program} 2 1000 > /dev/null & {program} 2 1000 > /dev/null && wait $!"
    result = run(
        TURN + TICK,
        ["--exit-status", "--", "sh", "-c", script],
        ["--allow-write", "--debugger", "gdb -p %p -nx -batch"],
    )
    assert result.status == 0, result.stderr
    (turned,) = [r for r in result.records if r["minor"] == 1]
    others = [r for r in result.records if r["minor"] == 2 and r["pid"] != turned["pid"]]
    assert len(others) == 2000
    assert len({r["pid"] for r in others}) == 1
    assert result.counts[1].hits == 1


def test_a_vfork_child_is_handed_over_and_its_parent_stays_probed(build: Builder, run: Runner) -> None:
    program = build("handover.c")
    result = run(
        TURN + TICK + "offset = hands_on\nreturn = yes\nminor = 3\npush r, retval\nlog 1\nexit\n",
        ["--exit-status", "--", str(program), "0", "50", "vfork"],
        ["--allow-write", "--debugger", "gdb -p %p -nx -batch"],
    )
    assert result.status == 0, result.stdout + result.stderr
    (turned,) = [r for r in result.records if r["minor"] == 1]
    parents = {r["pid"] for r in result.records if r["minor"] == 2}
    assert result.counts[2].hits == 50
    assert len(parents) == 1
    assert turned["pid"] not in parents
    # The return for which the parent waited meanwhile.
    assert result.words(3) == [[turned["pid"]]]


def test_two_processes_wait_for_their_turn_with_the_debugger(build: Builder, run: Runner) -> None:
    program = build("handover.c")
    source = TURN + "offset = outer\nminor = 2\nexit 1\n"
    script = f"{program} 1 10 > /dev/null; {program} 1 10 > /dev/null"
    result = run(
        source,
        ["--exit-status", "--", "sh", "-c", script],
        ["--allow-write", "--debugger", "gdb -p %p -nx -batch -ex 'info symbol $pc'"],
    )
    assert result.status == 0, result.stderr
    assert re.search(r"outer in section \.text.*turn in section \.text", result.stdout, re.DOTALL)


def test_a_debugger_that_fails_does_not_keep_the_process(build: Builder, run: Runner) -> None:
    program = build("handover.c")
    result = run(
        TURN, ["--exit-status", "--", str(program), "1", "10"], ["--allow-write", "--debugger", "sh -c 'exit 5' %p"]
    )
    assert result.status == 0, result.stderr
    assert re.search(
        r"the debugger of process \d+ \(handover\) ended with status 5; the process continues", result.stderr
    )


@pytest.mark.parametrize(
    ("debugger", "message"),
    [
        ("gdb", "--debugger needs %p, where the process id goes: gdb -p %p"),
        ("gdb -p %%p", "--debugger needs %p, where the process id goes: gdb -p %p"),
        ("no-such-debugger %p", "--debugger: command 'no-such-debugger' is not found"),
        ("", "the debugger's command is empty"),
        ("gdb '%p", "the debugger's command is not well formed: no closing quotation"),
    ],
)
def test_a_wrong_debugger_is_refused_before_anything_starts(
    build: Builder, run: Runner, tmp_path: Path, debugger: str, message: str
) -> None:
    marker = tmp_path / "started"
    result = run(TURN, ["--", "touch", str(marker)], ["--allow-write", "--debugger", debugger])
    assert result.status == 2
    assert message in result.stderr
    assert not marker.exists()


def read_until(terminal: int, text: str, seen: str) -> str:
    until = time.monotonic() + 30
    while text not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0, until - time.monotonic()))
        assert ready, f"'{text}' did not appear in:\n{seen}"
        try:
            seen += os.read(terminal, 4096).decode(errors="replace").replace("\r", "")
        except OSError:
            raise AssertionError(f"the terminal was closed before '{text}':\n{seen}") from None
    return seen


def test_at_a_terminal_gdb_is_started_and_has_the_terminal(build: Builder, tmp_path: Path) -> None:
    program = build("handover.c")
    source = tmp_path / "p.rpn"
    source.write_text(TURN)
    (tmp_path / ".gdbinit").write_text("set pagination off\n")
    arguments = [
        *DPROBES,
        "run",
        "--engine",
        "ptrace",
        str(source),
        "--allow-write",
        "--exit-status",
        "--",
        str(program),
        "2",
        "3000",
    ]
    client, terminal = pty.fork()
    if client == 0:
        try:
            os.execve(sys.executable, arguments, {**environment(), "TERM": "dumb", "HOME": str(tmp_path)})
        finally:
            os._exit(127)
    seen = ""
    try:
        seen = read_until(terminal, "(gdb) ", seen)
        assert re.search(r"dprobes: note: process \d+ \(handover\) is stopped .*: starting gdb -q -p", seen)
        for typed, answer in (
            ("\x03", "(gdb) "),  # Ctrl-C is for gdb alone
            ("info symbol $pc\n", "turn in section .text"),
            ("stepi\n", "in turn ()"),
            ("quit\n", "Quit anyway? (y or n) "),
            ("y\n", "\n6000 0\n"),
        ):
            os.write(terminal, typed.encode())
            read_until(terminal, answer, "")
        _, status = os.waitpid(client, 0)
        client = 0
        assert os.waitstatus_to_exitcode(status) == 0
    finally:
        if client:
            with contextlib.suppress(ProcessLookupError):
                os.kill(client, signal.SIGKILL)
            os.waitpid(client, 0)
        os.close(terminal)


def test_remove_takes_a_probepoint_out_of_every_process_of_the_tree(build: Builder, run: Runner) -> None:
    program = build("torture.c")
    source = (
        "name = torture\ngvars = 1\noffset = stepped\nminor = 1\ninc gv, 0\npush gv, 0\npush 300\nsub\njz gone\n"
        "push 1\nlog 1\nexit\ngone: remove\noffset = main\nminor = 2\nexit\n"
    )
    with running("sh", "-c", f"read x; {program} 600 2 & {program} 600 2 & wait", stdin=subprocess.PIPE) as shell:
        assert shell.stdin is not None
        process, output = run.start(source, ["-p", str(shell.pid)])
        await_traced(shell.pid)
        shell.stdin.write("go\n")
        shell.stdin.flush()
        await_line(shell)
        await_line(shell)
        pids = children_of(shell.pid)
        assert len(pids) == 2
        await_true(
            lambda: (
                output.exists()
                and len({memory_at(pid, program, "stepped", 1) for pid in pids} | {b"\xcc"}) == 2
                and output.read_text().count("\n") >= 299
            ),
            "the removal",
        )
        assert memory_at(pids[0], program, "stepped", 1) == memory_at(pids[1], program, "stepped", 1) != b"\xcc"
        assert all(tracer_of(pid) for pid in pids)
        for pid in pids:
            os.kill(pid, signal.SIGUSR2)
        assert shell.wait(TIMEOUT) == 0
        result = read_result(process, output)
    assert result.counts[1].hits == 300
