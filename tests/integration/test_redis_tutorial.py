"""The tutorial docs/tutorial/redis.md and README's first run: on a real redis they print lines of the shown shapes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.documented_commands import ROOT, Step, shapes, steps_of, under_test
from integration.support import TIMEOUT, accepts_connections, await_message, await_true

if TYPE_CHECKING:
    from collections.abc import Iterator

TUTORIAL = ROOT / "docs" / "tutorial" / "redis.md"
PAGE = TUTORIAL.read_text()
KEYS = 100_000
WORK = "".join(
    f"SET key:{number:012} xxx\r\nGET key:{number:012}\r\nLPUSH mylist xxx\r\n"
    for number in range(0, KEYS, KEYS // 500)
)
"""Commands of the page's load, as redis takes them from a terminal."""


STEPS = steps_of(TUTORIAL)
OTHERS = [steps_of(ROOT / page)[0] for page in ("README.md", "docs/how-to/production.md")]
RUNS = [step for step in STEPS if " run " in step.command]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the directory of a server with 100 000 keys: its socket, ``redis.pid`` and the page's ``slow.dpc``."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    directory = tmp_path_factory.mktemp("redis")
    (program_text,) = re.findall(r"^```c\n(module .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (directory / "slow.dpc").write_text(program_text)
    command = ["redis-server", "--port", "0", "--unixsocket", str(directory / "socket"), "--save", ""]
    process = subprocess.Popen([*command, "--dir", str(directory), "--loglevel", "warning"])
    try:
        await_true(
            lambda: accepts_connections(directory / "socket") or process.poll() is not None, "the server", TIMEOUT
        )
        (directory / "redis.pid").write_text(f"{process.pid}\n")
        fill = f"for i = 1, {KEYS} do redis.call('set', string.format('key:%012d', i), 'xxx') end"
        work(directory, f'EVAL "{fill}" 0\r\n')
        yield directory
        assert process.poll() is None, "the server ended while it was probed"
    finally:
        process.kill()
        process.wait()


def work(server: Path, commands: str = WORK + 2 * "keys *1\r\n") -> bytes:
    """Have the server carry out commands, and return what it replies."""
    replies = b""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT)
        connection.connect(str(server / "socket"))
        connection.sendall(commands.encode())
        connection.shutdown(socket.SHUT_WR)
        while received := connection.recv(1 << 16):
            replies += received
    return replies


def test_the_page_asks_its_three_questions_and_compares_three_engines() -> None:
    assert len(RUNS) == 7
    assert [engine for engine in ("ptrace", "inline", "ebpf") if f"`{engine}`" in PAGE] == ["ptrace", "inline", "ebpf"]
    assert sum("elapsed" in step.command for step in RUNS) == 3


def test_the_functions_that_the_page_lists(server: Path) -> None:
    (step,) = [step for step in STEPS if " list " in step.command]
    done = run_to_end(step, server)
    probed = r"^slowlogPushEntryIfNeeded +\d+  0x[0-9a-f]+  cheap"
    assert re.search(probed, step.output, re.MULTILINE)
    assert re.search(probed, done.stdout, re.MULTILINE)
    assert step.output.splitlines()[0].split() == done.stdout.splitlines()[0].split()


def run_to_end(step: Step, server: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", under_test(step)], cwd=server, capture_output=True, text=True, timeout=TIMEOUT, check=True
    )


def without_end(step: Step) -> str:
    """Return a step's command as it runs until the test interrupts it."""
    command = re.sub(r" --duration \d+s", "", under_test(step))
    return "exec " + command.replace("pidof redis-server", "cat redis.pid")


@pytest.mark.parametrize("step", [*RUNS, *OTHERS], ids=[*map(str, range(1, len(RUNS) + 1)), "README", "production"])
def test_a_step_prints_lines_as_the_page_shows_them(step: Step, server: Path) -> None:
    if step.root and os.geteuid() != 0:
        pytest.skip("this step needs root")
    process = subprocess.Popen(
        ["sh", "-c", without_end(step)], cwd=server, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        messages = await_message(process, "is active")
        work(server)
        process.send_signal(signal.SIGINT)
        output, rest = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    assert process.returncode == 0, messages + rest
    shown, printed = shapes(step.output), shapes(output + messages + rest)
    if "us > 1000" in step.command:
        # A busy machine may have made others slow, too.
        printed = {line for line in printed if "TIME" not in line or "keys" in line}
        assert all(int(us) > 1000 for us in re.findall(r"took (\d+) us", output))
    assert shown == printed


def test_the_server_has_its_code_back(server: Path) -> None:
    """The last test of the file: the server answers, and is traced by nobody."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT)
        connection.connect(str(server / "socket"))
        connection.sendall(b"DBSIZE\r\n")
        assert int(connection.recv(100)[1:]) >= KEYS
    status = Path(f"/proc/{(server / 'redis.pid').read_text().strip()}/status").read_text()
    assert "TracerPid:\t0\n" in status
