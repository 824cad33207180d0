"""What ``exit 1`` does with a process behind a stub: it stands still, and GDB takes over."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.support import DPROBES, TIMEOUT, await_message, environment

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder

HANDLER = """name = "{path}"
offset = handle
minor = 1
push r, arg1; log 1
push r, arg1; push 2; eq; jz out
exit 1
out: exit
"""


@pytest.fixture
def path(build: Builder) -> Path:
    return build("handled.c")


def stub_command(name: str, tmp_path: Path, path: Path) -> tuple[str, list[str]]:
    """Return an endpoint, and the command of a stub there."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    if name == "gdbserver":
        with socket.create_server(("localhost", 0)) as server:
            endpoint = f"localhost:{server.getsockname()[1]}"
        return endpoint, [name, "--once", endpoint, str(path), "6"]
    endpoint = str(tmp_path / "stub")
    return endpoint, [name, "-g", endpoint, str(path), "6"]


def start(name: str, tmp_path: Path, path: Path, text: str = HANDLER) -> subprocess.Popen[str]:
    endpoint, command = stub_command(name, tmp_path, path)
    source = tmp_path / "exit.rpn"
    source.write_text(text.format(path=path))
    line = [*DPROBES, "run", str(source), "--allow-write", "--engine", f"gdb={endpoint}", "--", *command]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())


STUBS = pytest.mark.parametrize("name", ["gdbserver", "qemu-x86_64"])


@STUBS
def test_exit_1_lets_a_debugger_take_over(name: str, tmp_path: Path, path: Path) -> None:
    if shutil.which("gdb") is None:
        pytest.skip("gdb is not installed")
    run = start(name, tmp_path, path)
    try:
        said = await_message(run, "hint:")
        found = re.search(r"hint: gdb (\S+) -ex '(target remote \S+)'", said)
        assert found is not None, said
        assert found[1] == str(path)
        wanted = ["print n", "print request->name", "break handle", "continue", "print n", "delete", "continue"]
        arguments = [part for each in (found[2], *wanted) for part in ("-ex", each)]
        gdb = ["gdb", "-nx", "-batch", found[1], *arguments]
        shown = subprocess.run(gdb, capture_output=True, text=True, timeout=TIMEOUT, check=False).stdout
        assert "$1 = 2" in shown
        assert '$2 = "first' in shown
        assert "$3 = 3" in shown
        assert "exited normally" in shown
        output, rest = run.communicate(timeout=TIMEOUT)
        assert run.returncode == 0, rest
        assert re.findall(r"handle  arg1=(\d)", output) == ["0", "1", "2"]
        assert "123\n" in output
    finally:
        run.kill()
        run.communicate(timeout=TIMEOUT)


@STUBS
def test_the_end_of_a_run_without_a_debugger_lets_the_process_go_on(name: str, tmp_path: Path, path: Path) -> None:
    run = start(name, tmp_path, path)
    await_message(run, "hint:")
    run.send_signal(signal.SIGTERM)
    output, said = run.communicate(timeout=TIMEOUT)
    assert run.returncode == 128 + signal.SIGTERM, said
    assert "123\n" in output


AT_RETURN = """name = "{path}"
offset = handle
minor = 1
return = yes
push entry, arg1; log 1
push entry, arg1; push 2; eq; jz out
exit 1
out: exit
"""
AT_ACCESS = """name = "{path}"
address = total:total + 7
watchpoint = w
minor = 1
push total; push mem, u64; log 1
push total; push mem, u64; push 9; eq; jz out
exit 1
out: exit
"""


@pytest.mark.parametrize(
    ("name", "text", "words"), [("qemu-x86_64", AT_RETURN, [0, 1, 2]), ("gdbserver", AT_ACCESS, [0, 9])]
)
def test_exit_1_at_a_return_and_behind_an_access(
    name: str, tmp_path: Path, path: Path, text: str, words: list[int]
) -> None:
    run = start(name, tmp_path, path, text)
    said = await_message(run, "hint:")
    assert "the process is stopped at 0x" in said
    run.send_signal(signal.SIGTERM)
    output, _ = run.communicate(timeout=TIMEOUT)
    assert "123\n" in output
    assert len(re.findall(r"^[0-9:.]+ ", output, re.MULTILINE)) == len(words), output
