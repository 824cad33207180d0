"""The recipes for the kernel (docs/how-to/recipes.md) on work that says itself what it did."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features
from integration.ebpf.kernel import has_begun, require_bpf, require_initial_namespace
from integration.support import await_true

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.support import Runner

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


def options(*more: str) -> list[str]:
    return ["--engine", "ebpf", "--templates", str(EXAMPLES / "templates"), *more]


def source_of(recipe: str) -> str:
    return (EXAMPLES / f"{recipe}.rpn").read_text()


def reads_kernel_memory() -> None:
    if (error := Features().error(Feature.READ_KERNEL)) is not None:
        pytest.skip(f"kernel lockdown: {error}")


def trace(run: Runner, recipe: str, *command: str) -> tuple[list[dict[str, Any]], str]:
    """Run a recipe on a command; return the records, and what the command printed."""
    result = run(source_of(recipe), ["--", *command], options())
    assert result.status == 0, result.stderr
    return result.records, result.stdout


@contextmanager
def everywhere(run: Runner, recipe: str, *more: str) -> Iterator[list[dict[str, Any]]]:
    """Run a recipe on the whole machine while something is done; give the records when that is over."""
    client, output = run.start(source_of(recipe), [], options(*more))
    await_true(lambda: has_begun(client.pid), "the run")
    records: list[dict[str, Any]] = []
    yield records
    time.sleep(0.2)  # what threads of the kernel do a little later
    result = run.end(client, output)
    assert result.status == 0, result.stderr
    records += result.records


def test_files_are_opened_with_a_result(run: Runner, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("x")
    records, _ = trace(run, "files-opened", "/bin/cat", f"{tmp_path}/there", f"{tmp_path}/not")
    opened = {record["fields"]["file"]: record["fields"]["result"] for record in records}
    assert opened[f"{tmp_path}/there"] >= 3
    assert opened[f"{tmp_path}/not"] == -errno.ENOENT


def test_the_name_of_an_error_is_printed(tmp_path: Path) -> None:
    command = ["run", "examples/files-opened.rpn", "--templates", "examples/templates", "--engine", "ebpf"]
    done = subprocess.run(
        [str(ROOT / ".venv/bin/dprobes"), *command, "--", "/bin/cat", f"{tmp_path}/not"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert re.search(rf"  cat\[\d+\] opens file={tmp_path}/not: result=-ENOENT$", done.stdout, re.MULTILINE)


def test_the_page_shows_what_is_printed() -> None:
    """Of what ``cat`` opens besides, its libraries, the page shows nothing."""
    page = (ROOT / "docs" / "how-to" / "recipes.md").read_text()
    shown = next(block for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL) if "# dprobes run" in block)
    command, *lines = shown.splitlines()
    arguments = command.removeprefix("# dprobes ").split()
    done = subprocess.run(
        [str(ROOT / ".venv/bin/dprobes"), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert len(lines) == 2
    for line in lines:
        assert re.search(rf"^{re.sub(r'[0-9]+', '[0-9]+', re.escape(line))}$", done.stdout, re.MULTILINE), done.stdout


def test_signals_have_a_sender_and_a_receiver(run: Runner) -> None:
    reads_kernel_memory()
    script = "sleep 100 & echo $$ $!; kill -TERM $!; wait"
    records, printed = trace(run, "signals-sent", "/bin/sh", "-c", script)
    sender, receiver = map(int, printed.split())
    sent = [(record["pid"], record["fields"]["signal"], record["fields"]["pid"]) for record in records]
    assert (sender, signal.SIGTERM, receiver) in sent
    by_kill = next(record for record in records if record["fields"]["signal"] == signal.SIGTERM)
    assert by_kill["fields"]["receiver"] in ("sh", "sleep")  # the shell's child may not have begun to sleep


def test_forks_name_parent_and_child(run: Runner) -> None:
    script = "for n in 1 2 3; do /bin/sh -c 'echo $PPID $$'; done; :"
    records, printed = trace(run, "forks", "/bin/sh", "-c", script)
    said = {tuple(map(int, line.split())) for line in printed.splitlines()}
    assert len(said) == 3
    assert said <= {(record["fields"]["parent"], record["fields"]["child"]) for record in records}


def test_page_faults_are_where_a_program_touches_memory(run: Runner) -> None:
    script = (
        "import mmap, ctypes\n"
        "m = mmap.mmap(-1, 64 * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "m.madvise(15)\n"  # MADV_NOHUGEPAGE
        "start = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
        "for n in range(0, 64, 2): m[n * 4096] = 1\n"
        "print(start)\n"
    )
    records, printed = trace(run, "page-faults", "/usr/bin/python3", "-c", script)
    start = int(printed)
    touched = [
        record["fields"] for record in records if start <= int(record["fields"]["address"], 16) < start + 64 * 4096
    ]
    assert {(int(each["address"], 16) - start) // 4096 for each in touched} == set(range(0, 64, 2))
    assert {each["error"] for each in touched} == {6}  # a write of a program to a page that is not there


def test_context_switches_show_who_sleeps(run: Runner) -> None:
    reads_kernel_memory()
    records, _ = trace(run, "context-switches", "/bin/sleep", "0.1")
    slept = [record["fields"] for record in records if record["fields"]["previous"] == "sleep"]
    assert any(each["state"] == 1 and each["pid"] == record["pid"] for each in slept for record in records)


def test_allocations_of_the_kernel_are_named_by_their_callers() -> None:
    command = ["run", "examples/kernel-allocations.rpn", "--templates", "examples/templates", "--engine", "ebpf"]
    done = subprocess.run(
        [str(ROOT / ".venv/bin/dprobes"), *command, "--", "/bin/cat", "/proc/self/maps"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    callers = re.findall(r"  cat\[\d+\] caller=(\S+) \[vmlinux\] bytes=(\d+)$", done.stdout, re.MULTILINE)
    assert any(caller.startswith("seq_read_iter+") and int(size) == 4096 for caller, size in callers)


def test_packets_have_their_length_and_device(run: Runner) -> None:
    reads_kernel_memory()
    script = (
        "import socket\n"
        "a = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); a.bind(('127.0.0.1', 0))\n"
        "for n in (100, 300, 700): a.sendto(bytes(n), a.getsockname())\n"
    )
    records, _ = trace(run, "packets", "/usr/bin/python3", "-c", script)
    sent = [record["fields"] for record in records if record["minor"] == 1]
    headers = 14 + 20 + 8  # Ethernet, IPv4, UDP
    assert [each["length"] for each in sent if each["device"] == "lo"] == [n + headers for n in (100, 300, 700)]
    received = [record["fields"]["length"] for record in records if record["minor"] == 2]
    assert {n + headers - 14 for n in (100, 300, 700)} <= set(received)


def test_connections_are_seen_from_both_ends(run: Runner) -> None:
    script = (
        "import socket\n"
        "s = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(s.getsockname())\n"
        "print(s.getsockname()[1], c.getsockname()[1]); a = s.accept()[0]; c.close(); a.close()\n"
    )
    reads_kernel_memory()
    records, printed = trace(run, "tcp-connections", "/usr/bin/python3", "-c", script)
    server, client = map(int, printed.split())
    made = {
        (each["port"], each["to_port"], each["state"], each["new_state"]): each
        for each in (record["fields"] for record in records)
    }
    syn_sent, syn_received, established = 2, 3, 1
    assert made[client, server, syn_sent, established]["from"] == "127.0.0.1"
    assert made[server, client, syn_received, established]["to"] == "127.0.0.1"


def test_requests_to_disks_have_their_time(run: Runner) -> None:
    reads_kernel_memory()
    size = 1 << 20
    device = ROOT.stat().st_dev
    if not os.major(device):
        pytest.skip("the tree is on no disk")
    before = time.monotonic_ns()
    with everywhere(run, "slow-disk", "-D", "SLOW=0") as records, (ROOT / ".disk-test").open("wb") as file:
        file.write(os.urandom(size))
        os.fsync(file.fileno())
    duration = time.monotonic_ns() - before
    (ROOT / ".disk-test").unlink()
    kernel_device = os.major(device) << 20 | os.minor(device)
    mine = [record["fields"] for record in records if record["fields"]["device"] == kernel_device]
    assert sum(each["sectors"] for each in mine) * 512 >= size
    assert all(0 < each["nanoseconds"] < duration for each in mine)


def test_a_work_item_is_joined_with_who_queued_it(run: Runner) -> None:
    """A socket that a process closes is freed by a work item, in a thread of the kernel."""
    with everywhere(run, "work-items") as records:
        for _ in range(20):
            a, b = socket.socketpair()
            a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b.fileno().to_bytes(4, "little"))])
            a.close()
            b.close()
        os.sync()
    queued = {record["fields"]["work"]: record["name"] for record in records if record["minor"] == 1}
    executed = {record["fields"]["work"]: record["name"] for record in records if record["minor"] == 2}
    joined = {work: (queued[work], name) for work, name in executed.items() if work in queued}
    assert joined
    assert all(name.startswith("kworker") for _, name in joined.values())
