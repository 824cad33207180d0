"""Runs of one process or command: which process a number means, and when such a run ends, with each engine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.platform.linux.procfs import thread_state
from integration.ebpf.kernel import require_bpf
from integration.support import await_message, await_true, code_is_original, is_traced, tracer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from integration.support import Builder

TIMEOUT = 60
ENGINES = ["ptrace", "inline", "ebpf"]

SOURCE = """\
#include <pthread.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>
__attribute__((noipa)) int tick(int n) { return n + 1; }
static void *other(void *unused)
{
    printf("%ld\\n", syscall(SYS_gettid));
    fflush(stdout);
    for (int n = 0;; n++) { tick(n); usleep(1000); }
}
int main(void)
{
    pthread_t thread;
    pthread_create(&thread, 0, other, 0);
    pthread_join(thread, 0);
}
"""


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "ebpf":
        require_bpf()
    return str(request.param)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("scopes")
    (directory / "ticks.c").write_text(SOURCE)
    subprocess.run(["gcc", "-O1", "-pthread", "ticks.c", "-o", "ticks"], cwd=directory, check=True)
    return directory / "ticks"


@pytest.fixture
def running(program: Path) -> Iterator[tuple[int, int]]:
    """The ids of a process, and of its thread that calls the function."""
    with subprocess.Popen([program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.kill()


def run(engine: str, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dprobes", "run", "--engine", engine, "-e", text, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)


def test_the_number_of_a_thread_means_its_process(engine: str, program: Path, running: tuple[int, int]) -> None:
    pid, tid = running
    done = run(engine, f'[maxhits 1] "{program}":tick {{ @ = count(); }}', "-p", str(tid))
    assert done.returncode == 0, done.stderr
    assert f"dprobes: note: {tid} is a thread of process {pid}, which is probed as a whole\n" in done.stderr
    assert done.stdout == "@: 1\n"


@pytest.mark.parametrize("text", ["[maxhits 1] {}:tick { @ = count(); }", "{}:tick { @ = count(); remove(); }"])
def test_a_run_ends_with_its_last_probepoint(engine: str, program: Path, running: tuple[int, int], text: str) -> None:
    done = run(engine, text.replace("{}", f'"{program}"'), "-p", str(running[0]))
    assert done.returncode == 0, done.stderr
    assert "dprobes: note: all probepoints have been removed or disabled: the run ends\n" in done.stderr
    assert "@: 1" in done.stdout.splitlines()
    os.kill(running[0], 0)


def test_a_function_that_never_returns_is_named(engine: str, program: Path, running: tuple[int, int]) -> None:
    done = run(engine, f'return "{program}":other {{ @ = count(); }}', "-p", str(running[0]))
    assert done.returncode == 1
    assert "0,0    other (return)     0  " in done.stderr
    assert done.stderr.endswith("dprobes: error: no probepoint was inserted: 'other' never returns\n")


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("{}:tick { @ = count(); }", ["--duration", "100ms"]),
        ("unsigned long hits; {}:tick { hits++; } every 10ms { if (hits) exit(); }", []),
    ],
)
def test_a_command_ends_with_a_run_that_ends_before(engine: str, program: Path, text: str, options: list[str]) -> None:
    """The output is a pipe: the run of dprobes is over when nobody holds that any more."""
    done = run(engine, text.replace("{}", f'"{program}"'), *options, "--exit-status", "--", str(program))
    assert done.returncode == 128 + 15, done.stderr


@contextlib.contextmanager
def probed_by_another(engine: str, program: Path, pid: int) -> Iterator[None]:
    text = f'"{program}":tick {{ @ = count(); }}'
    command = [sys.executable, "-m", "dprobes", "run", "--engine", engine, "-e", text, "-p", str(pid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as other:
        assert other.stderr is not None
        assert other.stderr.readline() == "dprobes: note: 1 probepoint is active; Ctrl-C ends the run\n"
        yield
        other.send_signal(signal.SIGINT)
        other.communicate(timeout=TIMEOUT)


@pytest.fixture
def foreign_breakpoint(program: Path, running: tuple[int, int]) -> Iterator[int]:
    """The process that somebody else traces, with a breakpoint at the function."""
    with probed_by_another("ptrace", program, running[0]):
        yield running[0]


def test_auto_sees_the_jump_before_an_instruction_too(program: Path, running: tuple[int, int]) -> None:
    """What follows an instruction of three bytes may look as in the file though a jump ends in it."""
    require_bpf()
    text = f'unsigned long hits; "{program}":tick+3 {{ hits++; }} every 10ms {{ if (hits) exit(); }}'
    with probed_by_another("inline", program, running[0]):
        done = run("auto", text, "-v", "--", str(program))
    assert done.returncode == 0, done.stderr
    assert (
        f"dprobes: note: engine inline: a uprobe would be in process {running[0]} (ticks) as well, which does not "
        "allow it: a jump of the dprobes of process "
    ) in done.stderr


def test_a_run_about_all_processes_says_what_can_be_probed(program: Path, foreign_breakpoint: int) -> None:
    require_bpf()
    done = run("auto", f'"{program}":tick {{ @ = count(); }}', "--duration", "100ms")
    assert done.returncode == 1
    assert (
        f"dprobes: warning: CONFLICT in process {foreign_breakpoint}: a breakpoint of the dprobes of process "
    ) in done.stderr
    assert (
        "dprobes: note: uprobes apply to all processes that execute a file\n"
        "hint: end the tool that changed the code, or give -p PID or a command to probe one process only\n"
    ) in done.stderr


def test_auto_takes_an_engine_that_no_breakpoint_elsewhere_keeps_away(program: Path, foreign_breakpoint: int) -> None:
    require_bpf()
    text = f'unsigned long hits; "{program}":tick {{ hits++; }} every 10ms {{ if (hits) exit(); }}'
    done = run("auto", text, "-v", "--", str(program))
    assert done.returncode == 0, done.stderr
    assert (
        f"dprobes: note: engine inline: a uprobe would be in process {foreign_breakpoint} (ticks) as well, which "
        "does not allow it: a breakpoint of the dprobes of process "
    ) in done.stderr


def test_a_command_is_not_started_if_nothing_can_be_probed(program: Path, foreign_breakpoint: int) -> None:
    require_bpf()
    done = run("ebpf", f'"{program}":tick {{ @ = count(); }}', "--", str(program))
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        "dprobes: error: no probepoint can be inserted, so the command was not started: CONFLICT in process "
        f"{foreign_breakpoint}: a breakpoint of the dprobes of process "
    ) in done.stderr


@contextlib.contextmanager
def generations(program: Path) -> Iterator[tuple[list[int], Callable[[int], None]]]:
    """The ids of a process, its child and its grandchild, and what makes one of them call ``step`` five times."""
    with subprocess.Popen([program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(3)]

        def call(pid: int) -> None:
            assert process.stdout is not None
            os.kill(pid, signal.SIGUSR1)
            assert int(process.stdout.readline()) == pid

        try:
            yield pids, call
        finally:
            process.kill()


@contextlib.contextmanager
def probed(engine: str, program: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    text = f'"{program}":step {{ @[pid] = count(); }}'
    command = [sys.executable, "-m", "dprobes", "run", "--engine", engine, "-e", text, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as client:
        said = await_message(client, "active; Ctrl-C ends the run")
        assert said.endswith("dprobes: note: 1 probepoint is active; Ctrl-C ends the run\n")
        try:
            yield client
        finally:
            client.kill()


@pytest.mark.parametrize("follow", [True, False])
def test_a_process_is_probed_with_the_descendants_that_it_has(engine: str, build: Builder, *, follow: bool) -> None:
    program = build("generations.c")
    with generations(program) as (pids, call):
        with probed(engine, program, *([] if follow else ["--no-follow"]), "-p", str(pids[0])) as client:
            for pid in pids:
                call(pid)
            client.send_signal(signal.SIGINT)
            output, errors = client.communicate(timeout=TIMEOUT)
            expected = {f"@[{pid}]: 5" for pid in (pids if follow else pids[:1])}
            assert set(output.split("\n")) - {""} == expected, errors
        assert not any(map(is_traced, pids))
        assert all(code_is_original(pid, program) for pid in pids)
        for pid in pids:
            call(pid)


@pytest.mark.parametrize("engine", ["ptrace", "inline"])
def test_a_child_of_vfork_of_a_descendant_is_probed_after_its_exec(engine: str, build: Builder) -> None:
    program = build("vforking.c")
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            with probed(engine, program, "-p", str(process.pid)) as client:
                process.stdin.write("\n")
                process.stdin.flush()
                assert int(process.stdout.readline()) == child
                client.send_signal(signal.SIGINT)
                output, errors = client.communicate(timeout=TIMEOUT)
                assert output == f"@[{child}]: 5\n", errors
        finally:
            process.kill()


@pytest.mark.parametrize("engine", ["ptrace", "inline"])
def test_a_child_that_has_ended_needs_no_probes_and_no_warning(engine: str, build: Builder) -> None:
    program = build("generations.c")
    with generations(program) as (pids, call):
        os.kill(pids[2], signal.SIGKILL)
        await_true(lambda: thread_state(pids[2]) == "Z", "a zombie")
        text = f'"{program}":step {{ @[pid] = count(); }}'
        command = [sys.executable, "-m", "dprobes", "run", "--engine", engine, "-e", text, "-p", str(pids[0])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as client:
            said = await_message(client, "active; Ctrl-C ends the run")
            for pid in pids[:2]:
                call(pid)
            client.send_signal(signal.SIGINT)
            output, errors = client.communicate(timeout=TIMEOUT)
        assert "warning" not in said + errors
        assert set(output.split("\n")) - {""} == {f"@[{pid}]: 5" for pid in pids[:2]}


@pytest.mark.parametrize("engine", ["ptrace", "inline"])
def test_descendants_lose_their_breakpoints_when_the_tracer_is_killed(engine: str, build: Builder) -> None:
    program = build("generations.c")
    with generations(program) as (pids, call):
        with probed(engine, program, "-p", str(pids[0])) as client:
            call(pids[2])
            os.kill(tracer_of(pids[2]), signal.SIGKILL)
            client.communicate(timeout=TIMEOUT)
        for pid in pids:
            call(pid)
        assert all(code_is_original(pid, program) for pid in pids)


def pages_for_copies(pid: int) -> list[str]:
    """Return the executable mappings of a process that no file backs, without those of the kernel."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return [line[0] for line in lines if line[1] == "r-xp" and len(line) == 5]


@pytest.mark.parametrize("bits", [64, 32])
def test_a_killed_tracer_leaves_pages_with_copies_of_instructions_in_32_bit_processes_only(
    build: Builder, bits: int
) -> None:
    program = build("generations.c", "-fno-pie", "-no-pie", i386=bits == 32)
    with generations(program) as (pids, call):
        with probed("ptrace", program, "-p", str(pids[0])) as client:
            for pid in pids:
                call(pid)
                assert len(pages_for_copies(pid)) == 1
            os.kill(tracer_of(pids[0]), signal.SIGKILL)
            client.communicate(timeout=TIMEOUT)
        assert [len(pages_for_copies(pid)) for pid in pids] == [int(bits == 32)] * 3
        for pid in pids:
            call(pid)


@pytest.mark.parametrize("engine", ["ptrace", "inline"])
def test_a_descendant_of_another_tracer_is_left_out_with_a_warning(engine: str, build: Builder) -> None:
    program = build("generations.c")
    seize = "import sys; from dprobes.platform.linux import ptrace_calls; ptrace_calls.seize(int(sys.argv[1]));"
    with generations(program) as (pids, call):
        command = [sys.executable, "-c", f"{seize} print(flush=True); sys.stdin.read()", str(pids[1])]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            text = f'"{program}":step {{ @[pid] = count(); }}'
            command = [sys.executable, "-m", "dprobes", "run", "--engine", engine, "-e", text, "-p", str(pids[0])]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as client:
                said = await_message(client, "active; Ctrl-C ends the run")
                assert (
                    f"dprobes: warning: process {pids[1]} (generations), a descendant of process {pids[0]}, has no "
                    "probes: it cannot be traced: operation not permitted\n"
                ) in said
                for pid in (pids[0], pids[2]):
                    call(pid)
                client.send_signal(signal.SIGINT)
                output, _ = client.communicate(timeout=TIMEOUT)
            assert set(output.split("\n")) - {""} == {f"@[{pids[0]}]: 5", f"@[{pids[2]}]: 5"}
            other.kill()


@pytest.mark.parametrize("engine", ["ptrace", "inline"])
def test_dprobes_does_not_probe_itself_among_descendants(engine: str, build: Builder) -> None:
    """A shell whose child dprobes is: it has probes, and dprobes has none, which calls the function as well."""
    text = "libc.so.6:getppid { @[pid] = count(); }"
    script = f"""{sys.executable} -c 'import ctypes, time
while True: ctypes.CDLL(None).getppid(); time.sleep(0.01)' & echo $!
{sys.executable} -m dprobes run --engine {engine} -e '{text}' --duration 500ms -p $$
kill -9 $!"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    child, *rows = done.stdout.splitlines()
    assert [row.partition(":")[0] for row in rows] == [f"@[{child}]"], done.stderr


@pytest.mark.parametrize("engine", ["ptrace", "inline"])
def test_only_python_processes_of_dprobes_are_left_out_and_named(engine: str, build: Builder, tmp_path: Path) -> None:
    """A shell has two children: a program whose first word is ``dprobes``, and a Python with a script of that name."""
    program, script = build("generations.c"), tmp_path / "dprobes"
    script.write_text("import sys; print(flush=True); sys.stdin.read()")
    line = f"""exec 3<&0; {sys.executable} {script} <&3 >{tmp_path}/out & echo $!
(exec -a dprobes {program}) & wait"""
    with subprocess.Popen(["bash", "-c", line], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        other, *pids = (int(process.stdout.readline()) for _ in range(4))
        await_true(lambda: (tmp_path / "out").read_text() == "\n", "the start of the script")
        text = f'"{program}":step {{ @[pid] = count(); }}'
        command = [sys.executable, "-m", "dprobes", "run", "--engine", engine, "-e", text, "-p", str(process.pid)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as client:
            try:
                said = await_message(client, "active; Ctrl-C ends the run")
                for pid in pids:
                    os.kill(pid, signal.SIGUSR1)
                    assert int(process.stdout.readline()) == pid
                client.send_signal(signal.SIGINT)
                output, _ = client.communicate(timeout=TIMEOUT)
            finally:
                client.kill()
                os.kill(pids[0], signal.SIGKILL)
                process.kill()
        assert (
            f"dprobes: note: descendants of process {process.pid} that belong to a dprobes have no probes: "
            f"{other} ({Path(sys.executable).name})\n"
        ) in said
        assert set(output.split("\n")) - {""} == {f"@[{pid}]: 5" for pid in pids}
