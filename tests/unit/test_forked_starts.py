"""``support.forked_starts``: a forked ``dprobes`` is like one that was executed, and is executed if it cannot be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from integration.support import kernel_state
from support.forked_starts import ForkedPopen, Server

if TYPE_CHECKING:
    from collections.abc import Iterator

DPROBES = [sys.executable, "-m", "dprobes"]
MISSING = [*DPROBES, "check", "missing.rpn"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.close()


@pytest.fixture
def forked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ForkedPopen, "server", server)


def outcome(start: type[subprocess.Popen[Any]], words: list[str], **options: Any) -> tuple[int, str, str]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start(words, text=True, **pipes, **options) as process:
        output, errors = process.communicate('name = "x"\noffset = y\n', timeout=60)
        return process.returncode, output, errors


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "words", [["--version"], ["check", "--help"], ["check", "-"], ["check", "p.rpn"], ["nonsense"]]
)
def test_a_forked_command_does_what_an_executed_one_does(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "p.rpn").write_text('name = "a"\noffset = b\nminor = 1\nexit\n')
    environment = {**os.environ, "COLUMNS": "60", "XDG_CACHE_HOME": str(tmp_path)}
    found = outcome(ForkedPopen, [*DPROBES, *words], cwd=tmp_path, env=environment)
    assert found == outcome(subprocess.Popen, [*DPROBES, *words], cwd=tmp_path, env=environment)


REPORT = """
import atexit, gc, json, os, signal, sys
from pathlib import Path
atexit.register(lambda: print("its end", flush=True))
print(json.dumps({
    "words": [sys.argv, sys.orig_argv, sys.path, __name__, Path("/proc/self/cmdline").read_text()],
    "place": [os.getcwd(), dict(os.environ), Path("/proc/self/comm").read_text(), os.getppid()],
    "files": [name for name in sorted(os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{name}")],
    "passed": [os.pread(int(sys.argv[1]), 9, 0).decode(), os.get_inheritable(int(sys.argv[1])), sys.stdin.read()],
    "signals": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
    "session": os.getsid(0) == os.getpid(),
    "collects": gc.isenabled(),
}))
sys.exit(sys.argv[2])
"""
STARTS = """
import atexit, gc, os, signal, subprocess, sys
from support.forked_starts import HelperPopen
HelperPopen.is_possible = True
gc.disable()
atexit.register(lambda: print("the end", flush=True))
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
passed, other = (os.memfd_create("memory") for _ in range(2))
os.write(passed, b"in memory")
sys.stdout = open(os.dup(1), "w", buffering=1)
is_forked = []
os.register_at_fork(after_in_parent=lambda: is_forked.append(True))
for start in (HelperPopen, subprocess.Popen):
    words = [sys.executable, "-P", "-m", "report", str(passed), "what is said"]
    with start(
        words, pass_fds=[passed], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        cwd="/", env={**os.environ, "A": "B"}, start_new_session=True,
    ) as process:
        print(process.communicate(b"typed"), process.returncode)
print(is_forked)
"""


def test_a_forked_helper_is_what_an_executed_one_is(tmp_path: Path) -> None:
    (tmp_path / "report.py").write_text(REPORT)
    paths = f"{tmp_path}:{Path(__file__).parents[1]}"
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", STARTS], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    forked, executed, forks, end = done.stdout.splitlines()
    assert "in memory" in executed
    assert executed.endswith(", b'what is said\\n') 1")
    assert forked == executed
    assert (forks, end, done.stderr) == ("[True]", "the end", "")


@pytest.mark.usefixtures("forked")
def test_a_forked_process_has_its_own_command_line() -> None:
    words = [*DPROBES, "check", "-"]
    with ForkedPopen(words, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert Path(f"/proc/{process.pid}/cmdline").read_text() == "".join(f"{word}\0" for word in words)


@pytest.mark.usefixtures("forked")
def test_a_forked_process_is_no_child_and_its_signal_is_its_status() -> None:
    with ForkedPopen([*DPROBES, "check", "-"], stdin=subprocess.PIPE) as process:
        assert process.poll() is None
        with pytest.raises(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
        process.kill()
        while kernel_state(process.pid) != "Z":
            pass
        assert process.wait(60) == -signal.SIGKILL


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "options",
    [
        {"preexec_fn": lambda: None},
        {"umask": 0o77},
        {"env": {**os.environ, "PYTHONPATH": "elsewhere"}},
        {"env": {**os.environ, "LC_ALL": "C"}},
    ],
)
def test_what_only_an_exec_can_do_is_an_exec(options: dict[str, Any]) -> None:
    with ForkedPopen(MISSING, stderr=subprocess.DEVNULL, **options) as process:
        assert os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT) is not None
        assert process.wait(60) == 2


@pytest.mark.usefixtures("forked")
def test_other_signals_ignored_are_inherited_by_an_exec() -> None:
    former = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with ForkedPopen(MISSING, stderr=subprocess.DEVNULL) as process:
            assert os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT) is not None
    finally:
        signal.signal(signal.SIGUSR2, former)


def test_a_server_is_no_child() -> None:
    def children() -> str:
        return Path(f"/proc/self/task/{os.getpid()}/children").read_text()

    before = children()
    server = Server()
    assert children() == before
    server.close()


@pytest.mark.usefixtures("forked")
def test_a_missing_directory_is_an_error_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ForkedPopen(MISSING, cwd=tmp_path / "missing")


@pytest.mark.usefixtures("forked")
def test_a_forked_process_has_its_session_at_once() -> None:
    words = [*DPROBES, "check", "-"]
    with ForkedPopen(words, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        assert os.getsid(process.pid) == process.pid
