"""The command that waits to be probed."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from dprobes.engines.command_launcher import Command
from dprobes.errors import EngineError, TargetError


def test_a_command_that_is_never_let_go_ends_also_if_another_process_holds_its_pipe() -> None:
    command = Command(["/bin/true"])
    held = os.dup(command._go)  # as a child that was forked meanwhile
    try:
        command.close()
        with pytest.raises(ProcessLookupError):
            os.kill(command.pid, 0)
    finally:
        os.close(held)


def test_a_failed_preparation_is_reported_with_its_reason_and_leaves_no_child() -> None:
    ids, write = os.pipe()

    def refuse(_parent: int) -> None:
        os.write(write, str(os.getpid()).encode())
        raise PermissionError(errno.EACCES, "refused")

    try:
        with pytest.raises(TargetError) as raised:
            Command(["/bin/true"], refuse)
        assert raised.value.message == "'/bin/true' cannot be started: the preparation failed: permission denied"
        with pytest.raises(ChildProcessError):
            os.waitpid(int(os.read(ids, 16)), os.WNOHANG)
    finally:
        os.close(ids)
        os.close(write)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EngineError("the tracer 12 has ended"), "the tracer 12 has ended"),
        (OSError("no number"), "no number"),
        (ValueError(), "ValueError"),
        (ValueError("x" * 5000), "x" * 1023),
        (ValueError("r"), "r"),
        (ValueError("17"), "17"),
        (ValueError("\udcff"), "?"),
    ],
    ids=["engine", "os", "value", "long", "ready", "number", "undecodable"],
)
def test_a_preparation_may_fail_with_any_exception(error: Exception, reason: str) -> None:
    def refuse(_parent: int) -> None:
        raise error

    with pytest.raises(TargetError) as raised:
        Command(["/bin/true"], refuse)
    assert raised.value.message == f"'/bin/true' cannot be started: the preparation failed: {reason}"


def test_arguments_that_execve_cannot_take_are_reported() -> None:
    command = Command(["/bin/true", "a\0b"])
    command.go()
    with pytest.raises(TargetError) as raised:
        command.check_started()
    assert raised.value.message == "'/bin/true' cannot be started: embedded null byte"
    command.close()


def test_a_child_that_is_killed_during_its_preparation_is_reported() -> None:
    with pytest.raises(TargetError) as raised:
        Command(["/bin/true"], lambda _parent: os.kill(os.getpid(), signal.SIGKILL))
    assert raised.value.message == "'/bin/true' cannot be started: it was killed before"


def test_a_program_whose_loader_is_missing_is_told_from_one_that_does_not_exist(tmp_path: Path) -> None:
    program = bytearray(Path("/bin/true").resolve().read_bytes())
    loader = b"/lib64/ld-linux-x86-64.so.2\0"
    place = program.index(loader)
    program[place : place + len(loader)] = b"/nowhere".ljust(len(loader), b"\0")
    path = tmp_path / "program"
    path.write_bytes(program)
    path.chmod(0o755)
    for arguments, why in (
        ([str(path)], f"'{path}' cannot be started: '/nowhere', which loads it, does not exist"),
        ([str(tmp_path / "none")], f"'{tmp_path}/none' cannot be started: no such file or directory"),
    ):
        command = Command(arguments)
        command.go()
        with pytest.raises(TargetError) as raised:
            command.wait()
        assert raised.value.message == why
        command.close()


def test_a_command_that_is_asked_to_end_does_also_if_it_is_stopped() -> None:
    command = Command(["/bin/sleep", "1000"])
    try:
        assert command.end() is None  # it has not begun
        command.go()
        command.check_started()
        os.kill(command.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, command.pid, os.WSTOPPED)
        status = command.end()
        assert status is not None
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        assert command.end() == status
    finally:
        command.close()
