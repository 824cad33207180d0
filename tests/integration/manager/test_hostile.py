"""What others do to a manager: to its files, its socket, and its clients."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.errors import ManagerError
from dprobes.manager.manager_files import RUNTIME, check_private, socket_address
from dprobes.manager.probe_manager import Manager  # noqa: TC001
from dprobes.manager.recorder import Recording
from integration.manager.test_manager import TICKS, ask, by_hand, connected
from integration.manager.test_protocol import ask as answer
from integration.support import NOBODY, TIMEOUT, await_true, code_is_original, is_traced

if TYPE_CHECKING:
    from pathlib import Path

    from integration.manager.sandbox import Sandbox, Service

STATUS = {"dprobes": 1, "verb": "status"}


@pytest.fixture
def source(sandbox: Sandbox, target: Service) -> Path:
    return sandbox.write("ticks.rpn", TICKS.format(library=target.library, function="write_file"))


def test_clients_that_stop_in_the_middle_of_a_line_make_room(sandbox: Sandbox) -> None:
    with by_hand(sandbox), contextlib.ExitStack() as stack:
        ends = []
        for _ in range(200):
            ends.append(stack.enter_context(connected(sandbox)))
            ends[-1].sendall(b'{"dprobes": 1,')
        assert sandbox.json("dprobes query --json") == {"programs": []}
        with ends[0].makefile("rb") as answers:
            assert json.loads(answers.readline())["error"] == {
                "kind": "ManagerError",
                "message": "the manager serves 64 clients already",
                "hint": "try again",
            }
        # Those that came last are still heard.
        ends[-1].sendall(b'"verb": "status"}\n')
        with ends[-1].makefile("rb") as answers:
            assert json.loads(answers.readline())["result"]["programs"] == 0


def test_clients_that_take_no_answers_make_room(sandbox: Sandbox) -> None:
    with by_hand(sandbox), contextlib.ExitStack() as stack:
        for _ in range(70):
            end = stack.enter_context(connected(sandbox))
            end.settimeout(0.01)
            with contextlib.suppress(OSError):
                for _ in range(2000):
                    end.sendall(b'{"dprobes": 1, "verb": "status"}\n' * 10)
            end.close()
        assert sandbox.json("dprobes query --json") == {"programs": []}


@pytest.mark.parametrize(
    ("verb", "arguments", "message"),
    [
        ("add-target", {"target": "file:/tmp/a\0b"}, "argument 'target' of 'add-target' has a character no name has"),
        ("query", {"name": "\ud800"}, "argument 'name' of 'query' has a character no name has"),
        ("remove", {"probe": [True, 1]}, "argument 'probe' of 'remove' must be a major and a minor code"),
        ("remove", {"probe": [1, -1]}, "argument 'probe' of 'remove' must be a major and a minor code"),
        (
            "getvars",
            {"index": [True, True]},
            "argument 'index' of 'getvars' must be two numbers, a lower and a higher one",
        ),
    ],
)
def test_arguments_that_are_almost_right_are_refused(
    sandbox: Sandbox, verb: str, arguments: dict[str, object], message: str
) -> None:
    with by_hand(sandbox), connected(sandbox) as end:
        said = ask(end, {"dprobes": 1, "verb": verb, "arguments": arguments})
        assert said["error"]["kind"] == "ManagerError"
        assert said["error"]["message"] == message


def test_the_version_of_the_protocol_is_a_number(sandbox: Sandbox) -> None:
    with by_hand(sandbox), connected(sandbox) as end:
        said = ask(end, {"dprobes": True, "verb": "status"})
        assert said["error"]["message"].startswith("the client speaks version True of the manager's protocol")


# Files that are taken away


def test_a_runtime_directory_that_is_removed_comes_back(sandbox: Sandbox, target: Service, source: Path) -> None:
    sandbox(f"dprobes insert {source} -p {target.pid} --engine ptrace")
    pid = sandbox.manager
    shutil.rmtree(sandbox.runtime)
    await_true(lambda: sandbox.manager == pid, "the lock file")
    await_true((sandbox.runtime / "manager.sock").exists, "the socket")
    target.call("write_file", 3)
    await_true(lambda: sandbox.counts(str(target.library)) == {1: 3}, "the hits")
    (sandbox.runtime / "manager.sock").unlink()
    await_true((sandbox.runtime / "manager.sock").exists, "the socket")
    assert sandbox("dprobes stop --manager") == "stopped 1 program\n"
    await_true(lambda: not (sandbox.runtime / "manager.sock").exists(), "the end of the manager")
    target.end()


def test_a_manager_whose_place_is_taken_ends_and_leaves_nothing(
    sandbox: Sandbox, target: Service, source: Path
) -> None:
    sandbox(f"dprobes insert {source} -p {target.pid} --engine ptrace")
    pid = sandbox.manager
    assert pid is not None
    assert is_traced(target.pid)
    aside = sandbox.directory / "aside"
    other = sandbox.runtime / "manager.lock"
    aside.mkdir(0o700)
    with (aside / "manager.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (aside / "manager.lock").rename(other)
        await_true(lambda: not is_traced(target.pid), "the end of the tracer")
    assert code_is_original(target.pid, target.library)
    log = (sandbox.runtime / "manager.log").read_text()
    assert "dprobes manager: another manager has taken the place of this one, which ends\n" in log
    target.end()


def test_that_the_trace_file_was_removed_is_said(sandbox: Sandbox, target: Service, source: Path) -> None:
    sandbox(f"dprobes insert {source} -p {target.pid} --engine ptrace")
    assert sandbox.shell("dprobes query").stderr == ""
    shutil.rmtree(sandbox.state)
    assert sandbox.shell("dprobes query").stderr == (
        f"dprobes: warning: records are lost: '{sandbox.state}/trace.dpt' has been "
        "removed: new records cannot be read\n"
    )


def test_why_a_manager_cannot_start_is_said_with_a_hint(sandbox: Sandbox, target: Service, source: Path) -> None:
    (sandbox.state).mkdir(0o700)
    (sandbox.state / "trace.dpt").mkdir()
    said = sandbox.refused(f"dprobes insert {source} -p {target.pid} --engine ptrace")
    assert said.endswith(f"dprobes: error: '{sandbox.state}/trace.dpt' cannot be written: is a directory\n")
    shutil.rmtree(sandbox.state)
    sandbox.state.write_text("")
    said = sandbox.refused(f"dprobes insert {source} -p {target.pid} --engine ptrace")
    assert said.endswith(
        f"dprobes: error: '{sandbox.state}' cannot be made: file exists\n"
        "hint: set DPROBES_STATE_DIR to a directory of your own\n"
    )
    assert not is_traced(target.pid)


def test_the_log_of_managers_does_not_grow_for_ever(sandbox: Sandbox, target: Service, source: Path) -> None:
    sandbox.runtime.mkdir(0o700)
    log = sandbox.runtime / "manager.log"
    log.write_bytes(b"x" * (2 << 20))
    sandbox(f"dprobes insert {source} -p {target.pid} --engine ptrace")
    assert log.stat().st_size < 1000


# Clients in a directory of somebody else

LISTENER = """
import fcntl, os, socket, sys
directory, victim = sys.argv[1:]
os.makedirs(directory, exist_ok=True)
os.chmod(directory, 0o755)
lock = open(directory + "/manager.lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
lock.write(victim + "\\n")
lock.flush()
os.chmod(directory + "/manager.lock", 0o644)
end = socket.socket(socket.AF_UNIX)
end.bind(directory + "/manager.sock")
os.chmod(directory + "/manager.sock", 0o666)
end.listen()
print("listening", flush=True)
while True:
    client, _ = end.accept()
    print("heard", client.recv(100), flush=True)
"""


def test_a_client_does_not_speak_with_a_listener_of_somebody_else(
    tmp_path: Path, nobody_environment: dict[str, str]
) -> None:
    """Who can make the directory before its user does is neither heard nor believed, least of all whom to kill."""
    if os.geteuid() != 0:
        pytest.skip("needs root: becomes another user")
    from integration.manager.sandbox import Sandbox
    from integration.support import as_nobody, nobody_python

    for place in (tmp_path, *tmp_path.parents[:2]):
        place.chmod(place.stat().st_mode | 0o055)
    sandbox = Sandbox(tmp_path, (nobody_python(), "-m", "dprobes"), as_nobody(), **nobody_environment)
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, user=NOBODY) as victim,
        subprocess.Popen(
            [sys.executable, "-c", LISTENER, str(sandbox.runtime), str(victim.pid)], stdout=subprocess.PIPE, text=True
        ) as listener,
    ):
        try:
            assert listener.stdout is not None
            assert listener.stdout.readline() == "listening\n"
            for line in ("dprobes query", "dprobes stop", "dprobes remove --all"):
                assert sandbox.refused(line) == (
                    f"dprobes: error: '{sandbox.runtime}' belongs to user 0, not to this one ({NOBODY})\n"
                    "hint: set DPROBES_RUNTIME_DIR to a directory of your own\n"
                )
            assert victim.poll() is None
            listener.kill()
            assert listener.stdout.read() == ""
        finally:
            listener.kill()
            victim.kill()


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runtime"
    check_private(path, RUNTIME)  # one that is missing has nothing to be believed
    path.mkdir()
    path.chmod(0o777)
    with pytest.raises(ManagerError) as raised:
        check_private(path, RUNTIME)
    assert raised.value.message == f"'{path}' can be written by others (mode 0777)"
    link = tmp_path / "link"
    link.symlink_to(path)
    path.chmod(0o700)
    check_private(path, RUNTIME)
    with pytest.raises(ManagerError) as raised:
        check_private(link, RUNTIME)
    assert raised.value.message == f"'{link}' is not a directory"


def test_stop_kills_who_holds_the_lock_only(sandbox: Sandbox) -> None:
    """A process id that a dead manager has left behind may be anybody's by now."""
    sandbox.runtime.mkdir(0o700)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        (sandbox.runtime / "manager.lock").write_text(f"{bystander.pid}\n")
        assert "no probe manager runs" in sandbox.refused("dprobes stop")
        assert bystander.poll() is None
        bystander.communicate(b"\n", timeout=TIMEOUT)


def test_a_listener_that_never_answers_is_not_waited_for_by_stop(sandbox: Sandbox) -> None:
    sandbox.runtime.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as end:
        with socket_address(sandbox.runtime / "manager.sock") as address:
            end.bind(address)
        end.listen()
        assert sandbox.refused("dprobes stop") == "dprobes: error: the probe manager does not answer: timed out\n"


def test_a_probepoint_is_removed_once(sandbox: Sandbox, target: Service, source: Path) -> None:
    sandbox(f"dprobes insert {source} -p {target.pid} --engine ptrace")
    assert sandbox("dprobes remove 5,1") == "removed 1 probepoint 5,1\n"
    await_true(lambda: sandbox.probes(str(target.library))[0]["state"] == "REMOVED", "its state")
    assert sandbox.refused("dprobes remove 5,1") == "dprobes: error: the probepoint 5,1 is removed already\n"


def test_a_compiled_program_without_end_is_not_read_to_the_end(sandbox: Sandbox) -> None:
    assert sandbox.refused("dprobes apply /dev/zero").startswith("dprobes: error: '/dev/zero': this is not a PPDF")
    assert sandbox.manager is None


def test_a_session_is_given_up_when_its_records_cannot_go_anywhere(
    manager: Manager, insertion: dict[str, Any], target: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object, source: object) -> None:
        raise MemoryError

    with monkeypatch.context() as context:
        context.setattr(Recording, "open_program", fail)
        with pytest.raises(MemoryError):
            answer(manager, "insert", **insertion)
    await_true(lambda: not is_traced(target.pid), "the end of the tracer")
    assert code_is_original(target.pid, target.library)
    assert answer(manager, "query") == {"programs": []}
    assert answer(manager, "insert", **insertion)["program"]["probes"][0]["state"] == "ACTIVE"


def test_nothing_is_inserted_any_more_when_the_manager_ends(manager: Manager, insertion: dict[str, Any]) -> None:
    manager.end()
    with pytest.raises(ManagerError) as raised:
        answer(manager, "insert", **insertion)
    assert raised.value.message == "the probe manager is ending"
