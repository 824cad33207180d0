"""The manager's own life: one for each user, hard to hurt, and nothing is left when it goes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.manager.manager_files import socket_address
from dprobes.platform.linux.procfs import process_field
from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.ebpf.objects import await_gone, kernel_objects
from integration.manager.sandbox import Sandbox, service
from integration.support import (
    NOBODY,
    TIMEOUT,
    as_nobody,
    await_line,
    await_true,
    code_is_original,
    is_traced,
    nobody_python,
    running,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.manager.sandbox import Service
    from integration.support import Builder

TICKS = 'name = "{library}"\nmajor = 5\noffset = {function}\nminor = 1\npush r, arg0\nlog 1\nexit\n'
MANAGER = [sys.executable, "-m", "dprobes.manager"]


@pytest.fixture
def source(sandbox: Sandbox, target: Service) -> Path:
    return sandbox.write("ticks.rpn", TICKS.format(library=target.library, function="write_file"))


@contextlib.contextmanager
def connected(sandbox: Sandbox) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as end:
        end.settimeout(TIMEOUT)
        with socket_address(sandbox.runtime / "manager.sock") as address:
            end.connect(address)
        yield end


@contextlib.contextmanager
def by_hand(sandbox: Sandbox) -> Iterator[None]:
    """Have a manager that no client has started."""
    with subprocess.Popen(MANAGER, env=sandbox.environment) as manager:
        try:
            await_true((sandbox.runtime / "manager.sock").exists, "the manager")
            yield
        finally:
            manager.terminate()
            assert manager.wait(TIMEOUT) == 0


def ask(end: socket.socket, request: Any) -> Any:
    end.sendall(json.dumps(request).encode() + b"\n")
    with end.makefile("rb") as answers:
        return json.loads(answers.readline())


# Starting


def test_there_is_one_manager(sandbox: Sandbox, target: Service, source: Path) -> None:
    sandbox(f"dprobes insert {source} -p {target.pid} --engine ptrace")
    pid = sandbox.manager
    second = subprocess.run(MANAGER, env=sandbox.environment, check=False, timeout=TIMEOUT)
    assert second.returncode == 3
    sandbox(f"dprobes remove --all; dprobes insert {source} -p {target.pid} --engine ptrace")
    assert sandbox.manager == pid
    assert (sandbox.runtime / "manager.sock").stat().st_mode & 0o777 == 0o600
    assert sandbox.runtime.stat().st_mode & 0o777 == 0o700


def test_clients_that_start_at_once_start_one_manager(sandbox: Sandbox, build: Builder, engine: str) -> None:
    with contextlib.ExitStack() as stack:
        targets = [stack.enter_context(service(build)) for _ in range(10)]
        source = sandbox.write("ticks.rpn", TICKS.format(library=targets[0].library, function="write_file"))
        clients = [
            sandbox.start(f"dprobes insert {source} --engine {engine} -p {each.pid} --as p{n}")
            for n, each in enumerate(targets)
        ]
        for client in clients:
            stdout, stderr = client.communicate(timeout=TIMEOUT)
            assert client.returncode == 0, stderr
            assert "1 of 1 probepoints active" in stdout
        programs = sandbox.json("dprobes query --json")["programs"]
        assert sorted(program["name"] for program in programs) == sorted(f"p{n}" for n in range(10))
        for n, each in enumerate(targets):
            each.call("write_file", n + 1)
        await_true(
            lambda: [sandbox.counts(f"p{n}")[1] for n in range(10)] == list(range(1, 11)), "the hits of each process"
        )


def test_a_socket_that_nobody_listens_at_is_replaced(sandbox: Sandbox, target: Service, source: Path) -> None:
    sandbox(f"dprobes insert {source} -p {target.pid} --engine ptrace")
    sandbox.kill()
    assert (sandbox.runtime / "manager.sock").exists()
    assert "no probe manager runs" in sandbox.refused("dprobes query")
    await_true(lambda: not is_traced(target.pid), "the end of the tracer")
    sandbox(f"dprobes insert {source} -p {target.pid} --engine ptrace")
    target.call("write_file", 2)
    await_true(lambda: sandbox.counts(str(target.library)) == {1: 2}, "the hits")


def test_a_directory_may_have_a_long_path(tmp_path: Path, target: Service) -> None:
    directory = tmp_path / ("long" * 40)
    directory.mkdir()
    sandbox = Sandbox(directory)
    source = sandbox.write("ticks.rpn", TICKS.format(library=target.library, function="write_file"))
    try:
        sandbox(f"dprobes insert {source} -p {target.pid} --engine ptrace")
        target.call("write_file", 2)
        await_true(lambda: sandbox.counts(str(target.library)) == {1: 2}, "the hits")
    finally:
        sandbox.close()


def test_a_directory_of_somebody_else_is_refused(sandbox: Sandbox, target: Service, source: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: a directory is given to another user")
    sandbox.runtime.mkdir()
    os.chown(sandbox.runtime, NOBODY, NOBODY)
    assert sandbox.refused(f"dprobes insert {source} -p {target.pid}") == (
        f"dprobes: error: '{sandbox.runtime}' belongs to user {NOBODY}, not to this one (0)\n"
        "hint: set DPROBES_RUNTIME_DIR to a directory of your own\n"
    )


# Ends


def test_a_manager_that_is_told_to_end_takes_everything_with_it(
    sandbox: Sandbox, target: Service, source: Path, engine: str
) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        sandbox(f"dprobes insert {source} -p {target.pid} --engine {engine}")
        sandbox.kill(number)
        assert code_is_original(target.pid, target.library)
        assert not is_traced(target.pid)
        assert not (sandbox.runtime / "manager.sock").exists()
    target.call("write_file", 10)
    target.end()


def test_a_manager_that_is_killed_leaves_nothing(sandbox: Sandbox, target: Service, source: Path, engine: str) -> None:
    """With a program at rest, and with one that is being hit all the time."""
    for turn in range(4):
        sandbox(f"dprobes insert {source} -p {target.pid} --engine {engine}")
        if turn % 2:
            target.start("write_file", 20_000)
            await_true(lambda: sandbox.counts(str(target.library))[1] > 10, "some hits")
        pid = sandbox.manager
        assert pid is not None
        objects = kernel_objects(pid)
        sandbox.kill()
        await_gone(objects)
        await_true(lambda: not is_traced(target.pid), "the end of the tracer")
        assert code_is_original(target.pid, target.library)
        if turn % 2:
            target.finish(20_000)
        target.call("write_file", 10)
    target.end()


def test_a_manager_that_is_killed_at_any_time_leaves_nothing(
    sandbox: Sandbox, target: Service, source: Path, engine: str
) -> None:
    """In the middle of an insertion and a removal as well."""
    times = random.Random(5)
    for turn in range(8):
        sandbox("dprobes stop > /dev/null 2>&1; true")
        line = f"dprobes insert {source} -p {target.pid} --engine {engine}; dprobes remove --all"
        client = sandbox.start(line if turn % 2 else line.partition(";")[0])
        await_true(lambda: sandbox.manager is not None, "a manager")
        time.sleep(times.random() * 0.8)
        if sandbox.manager is not None:
            with contextlib.suppress(AssertionError, ProcessLookupError):
                sandbox.kill()
        client.communicate(timeout=TIMEOUT)
        if sandbox.manager is not None:
            sandbox.kill()
        await_true(lambda: not is_traced(target.pid), "the end of the tracer")
        await_true(lambda: code_is_original(target.pid, target.library), "the original code")
        target.call("write_file", 3)
    said = sandbox(f"dprobes insert {source} -p {target.pid} --engine {engine}")
    assert "1 of 1 probepoints active" in said
    target.call("write_file", 3)
    await_true(lambda: sandbox.counts(str(target.library)) == {1: 3}, "the hits")
    sandbox("dprobes remove --all")
    target.end()


def test_a_program_whose_processes_have_ended_says_so(
    sandbox: Sandbox, target: Service, source: Path, engine: str
) -> None:
    sandbox(f"dprobes insert {source} -p {target.pid} --engine {engine}")
    target.call("write_file", 2)
    target.end()
    await_true(lambda: sandbox.json("dprobes query --json")["programs"][0]["ended"], "the end of the program")
    assert sandbox.counts(str(target.library)) == {1: 2}
    with service_again(target) as another:
        # The name is free again.
        said = sandbox(f"dprobes insert {source} -p {another.pid} --engine {engine}")
        assert "1 of 1 probepoints active" in said


@contextlib.contextmanager
def service_again(target: Service) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([target.program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    try:
        yield process
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(TIMEOUT)


# Clients


def test_clients_with_garbage_hurt_nobody(sandbox: Sandbox, target: Service, source: Path, engine: str) -> None:
    sandbox(f"dprobes insert {source} -p {target.pid} --engine {engine}")
    generator = random.Random(3)
    with contextlib.ExitStack() as hanging:
        for _ in range(20):  # that say nothing, or half a line, and stay
            end = hanging.enter_context(connected(sandbox))
            end.send(b'{"dprobes": 1, "verb":'[: generator.randrange(20)])
        for garbage in (
            b"\n",
            b"hello\n",
            b"[1, 2]\n",
            b"[" * 100_000 + b"\n",
            b'{"a":' * 5000 + b"\n",
            b"\xff\xfe\x00\n",
            generator.randbytes(1 << 16) + b"\n",
        ):
            with connected(sandbox) as end:
                end.sendall(garbage)
                with end.makefile("rb") as answers:
                    said = json.loads(answers.readline())
                assert said["error"]["kind"] in ("FormatError", "ManagerError")
        with connected(sandbox) as end, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(70):  # a line without end
                end.sendall(bytes(1 << 20))
        target.call("write_file", 3)
        await_true(lambda: sandbox.counts(str(target.library)) == {1: 3}, "the hits")
    target.call("write_file", 2)
    await_true(lambda: sandbox.counts(str(target.library)) == {1: 5}, "the hits")


def test_idle_clients_make_room_for_others(sandbox: Sandbox) -> None:
    with by_hand(sandbox), contextlib.ExitStack() as stack:
        ends = []
        for _ in range(70):
            ends.append(stack.enter_context(connected(sandbox)))
            assert "result" in ask(ends[-1], {"dprobes": 1, "verb": "status"})
        assert sandbox.json("dprobes query --json") == {"programs": []}
        assert ask(ends[-1], {"dprobes": 1, "verb": "status"})["result"]["programs"] == 0
        with ends[0].makefile("rb") as answers:
            assert json.loads(answers.readline())["error"]["message"] == "the manager serves 64 clients already"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            {"dprobes": 2, "verb": "status"},
            "the client speaks version 2 of the manager's protocol, this manager (dprobes 0.1.0) version 1",
        ),
        (
            {"verb": "status"},
            "the client speaks version None of the manager's protocol, this manager (dprobes 0.1.0) version 1",
        ),
        ({"dprobes": 1}, "a request needs a verb, a string, and arguments, an object"),
        (
            {"dprobes": 1, "verb": "query", "arguments": []},
            "a request needs a verb, a string, and arguments, an object",
        ),
        ({"dprobes": 1, "verb": "fly"}, "the manager (dprobes 0.1.0) has no verb 'fly'"),
        (
            {"dprobes": 1, "verb": "query", "arguments": {"nam": "x", "b": 1}},
            "the manager's verb 'query' has no argument 'b', 'nam'",
        ),
        (
            {"dprobes": 1, "verb": "stop", "arguments": {"manager": True, "now": True}},
            "the manager's verb 'stop' has no argument 'now'",
        ),
        (
            {"dprobes": 1, "verb": "add-target", "arguments": {"target": "KLOG", "format": "xml"}},
            "there is no format 'xml'",
        ),
        ({"dprobes": 1, "verb": "query", "arguments": {"name": 1}}, "argument 'name' of 'query' must be a text"),
        ({"dprobes": 1, "verb": "insert"}, "'insert' needs the argument 'ppdf'"),
        (
            {"dprobes": 1, "verb": "insert", "arguments": {"ppdf": "!"}},
            "argument 'ppdf' of 'insert' is not base64 text",
        ),
        (
            {"dprobes": 1, "verb": "getvars", "arguments": {"index": [3, 1]}},
            "argument 'index' of 'getvars' must be two numbers, a lower and a higher one",
        ),
        (
            {"dprobes": 1, "verb": "remove", "arguments": {}},
            "no program is selected: expected a name, or all",
        ),
    ],
)
def test_requests_that_are_not_as_documented_are_refused(sandbox: Sandbox, request_: Any, message: str) -> None:
    with by_hand(sandbox), connected(sandbox) as end:
        assert ask(end, request_)["error"]["message"] == message
        assert ask(end, {"dprobes": 1, "verb": "status"})["result"]["programs"] == 0


def test_another_user_is_not_heard(sandbox: Sandbox) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: becomes another user")
    with by_hand(sandbox):
        path = sandbox.runtime / "manager.sock"
        code = (
            f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({str(path)!r}); print(s.recv(999).decode())"
        )

        def other() -> subprocess.CompletedProcess[str]:
            python = "/usr/bin/python3"  # which every user can execute
            return subprocess.run(
                [python, "-c", code], user=NOBODY, capture_output=True, text=True, check=False, timeout=TIMEOUT
            )

        for place in (sandbox.directory, *sandbox.directory.parents):
            with contextlib.suppress(OSError):
                place.chmod(place.stat().st_mode | 0o055)
        assert "PermissionError" in other().stderr
        sandbox.runtime.chmod(0o755)
        assert "PermissionError" in other().stderr
        path.chmod(0o666)
        said = json.loads(other().stdout)["error"]
        assert said["kind"] == "PrivilegeError"
        assert said["message"] == f"this manager belongs to user 0, not to user {NOBODY}"


def test_twenty_clients_at_once(sandbox: Sandbox, target: Service, source: Path) -> None:
    require_bpf()
    require_initial_namespace()
    target.start("write_file", 3_000_000)

    def inserted_and_removed(number: int) -> None:
        for _ in range(2):
            sandbox(f"dprobes insert {source} --engine ebpf -p {target.pid} --as p{number}")
            sandbox("dprobes query --json")
            sandbox("dprobes getvars --json")
            sandbox(f"dprobes remove --name p{number}")

    with ThreadPoolExecutor(20) as clients:
        list(clients.map(inserted_and_removed, range(20)))
    assert sandbox("dprobes query") == "no program is inserted\n"
    assert code_is_original(target.pid, target.library)
    target.finish(3_000_000, timeout=120)


# Users


def test_an_ordinary_user_has_a_manager_of_his_own(
    tmp_path: Path, build: Builder, nobody_environment: dict[str, str]
) -> None:
    """Without any privilege, by ptrace."""
    if os.geteuid() != 0:
        pytest.skip("needs root: becomes another user")
    for place in (tmp_path, *tmp_path.parents[:2]):
        place.chmod(place.stat().st_mode | 0o055)
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    command = (nobody_python(), "-m", "dprobes")
    sandbox = Sandbox(home, command, as_nobody(), HOME=str(home), **nobody_environment)
    with service(build) as unreachable:
        source = home / "ticks.rpn"
        source.write_text(TICKS.format(library=unreachable.library, function="write_file"))
        refusal = sandbox.refused(f"dprobes insert {source} -p {unreachable.pid}")
        assert f"process {unreachable.pid} (service) belongs to user 0, not to user {NOBODY}" in refusal
        assert code_is_original(unreachable.pid, unreachable.library)
    done = sandbox.shell(f"printf 'write_file 5\\n' | dprobes insert {source} -v --as svc -- {unreachable.program}")
    assert done.returncode == 0, done.stderr
    assert "engine ptrace: the ebpf engine cannot work here: this user lacks CAP_BPF and CAP_PERFMON" in done.stderr
    await_true(lambda: sandbox.json("dprobes query --json")["programs"][0]["ended"], "the end of the command")
    assert sandbox.counts("svc") == {1: 5}
    assert sandbox("dprobes log --format hex").count("DProbes(5,1)") == 5
    assert sandbox("dprobes stop --manager") == "stopped 1 program\n"


def test_fifty_programs_with_a_hundred_probepoints_each(sandbox: Sandbox, build: Builder) -> None:
    require_bpf()
    require_initial_namespace()
    program = build("many.c")
    with running(program, 3, "wait", stdin=subprocess.PIPE) as process:
        assert await_line(process) == "ready\n"
        for number in range(50):
            text = f'name = "{program}"\nmajor = {number + 1}\noffset = many_{number + 10}??\nminor = 1\nexit\n'
            source = sandbox.write(f"{number}.rpn", text)
            said = sandbox(f"dprobes insert {source} --engine ebpf -p {process.pid} --as p{number}")
            assert said == f"inserted 'p{number}': 100 of 100 probepoints active\n"
        assert process.stdin is not None
        process.stdin.close()
        process.wait(TIMEOUT)

        def hits() -> dict[str, set[int]]:
            programs = sandbox.json("dprobes query --json")["programs"]
            return {each["name"]: {probe["counts"]["hits"] for probe in each["probes"]} for each in programs}

        await_true(lambda: hits() == {f"p{number}": {3} for number in range(50)}, "three hits everywhere")
        assert sandbox("dprobes query").count("100 probepoints") == 50
        assert sandbox("dprobes remove --all").count("removed p") == 50
    assert sandbox("dprobes query") == "no program is inserted\n"


def test_a_program_is_replaced_while_it_is_hit(sandbox: Sandbox, target: Service, source: Path, engine: str) -> None:
    """Every call is a hit of exactly one of them."""
    rounds, calls = 6, 400_000 if engine == "ebpf" else 30_000
    options = f"--engine {engine} -p {target.pid} --as svc"
    quiet = 'name = "{library}"\nmajor = {major}\noffset = write_file\nminor = 1\npasscount = 1000000000\nexit\n'
    sandbox(f"dprobes insert {sandbox.write('0.rpn', quiet.format(library=target.library, major=1))} {options}")
    target.start("write_file", calls, 2)
    counted = 0
    for number in range(1, rounds):
        path = sandbox.write(f"{number}.rpn", quiet.format(library=target.library, major=number + 1))
        before = sandbox.json("dprobes query --json")
        said = sandbox.json(f"dprobes insert {path} {options} --replace --json")
        assert said["program"]["probes"][0]["major"] == number + 1
        assert before["programs"][0]["probes"][0]["major"] == number
        counted += said["replaced"][0]["probes"][0]["counts"]["hits"]
    target.finish(2 * calls, timeout=180)
    await_true(lambda: counted + sandbox.counts("svc")[1] == 2 * calls, "every call as one hit")
    broken = sandbox.write("broken.rpn", f'name = "{target.library}"\nmajor = 9\noffset = no_such\nminor = 1\nexit\n')
    assert "has no symbol 'no_such'" in sandbox.refused(f"dprobes insert {broken} {options} --replace", status=2)
    assert sandbox.probes("svc")[0]["state"] == "ACTIVE"
    sandbox("dprobes remove --all")
    target.end()


def test_getvars_shows_keyed_tables(sandbox: Sandbox, target: Service, engine: str) -> None:
    source = sandbox.write(
        "tables.rpn",
        f'name = "{target.library}"\ntable = calls, count, comm\noffset = write_file\ntally calls\nabort\n',
    )
    sandbox(f"dprobes insert {source} -p {target.pid} --engine {engine}")
    target.call("write_file", 7)
    name = process_field(target.pid, "Name")
    await_true(lambda: f"@calls[{name}]: 7\n" in sandbox("dprobes getvars"), "the hits")
    shown = json.loads(sandbox("dprobes getvars --json"))["programs"]
    assert shown[0]["tables"] == [{"table": "calls", "kind": "count", "keys": [name], "value": 7}]
