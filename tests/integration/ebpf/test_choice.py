"""Which engine ``auto`` takes for real runs, and what it says about it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.ebpf.objects import await_attached
from integration.support import (
    DPROBES,
    TIMEOUT,
    await_breakpoint,
    await_line,
    await_message,
    await_true,
    is_traced,
    read_result,
    running,
    symbols_of,
)

if TYPE_CHECKING:
    from integration.support import Builder, Runner

AUTO = ("--engine", "auto", "-v")
SEEDS = Path(__file__).parents[2] / "fixtures" / "seeds"
TICK = "name = {name}\noffset = tick\nminor = 1\nexit\n"
KERNEL = "handlers run in the kernel, and nothing in the program needs ptrace"


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


def chosen(engine: str, reason: str) -> str:
    return f"dprobes: note: engine {engine}: {reason}\n"


def test_a_command_is_for_the_kernel(build: Builder, run: Runner) -> None:
    result = run.command(TICK.format(name="hotloop"), build("hotloop.c"), 5, options=AUTO)
    assert result.stderr.startswith(chosen("ebpf", KERNEL))
    assert result.counts[1].hits == 5


def test_nothing_is_said_unless_it_is_asked_for(build: Builder, run: Runner, application: Path) -> None:
    quiet = AUTO[:2]
    result = run.command(TICK.format(name="hotloop"), build("hotloop.c"), 5, options=quiet)
    assert result.stderr.startswith("probe  place")
    assert result.counts[1].hits == 5
    other = run.command(EXAMPLE_1, application, 5, options=quiet)
    assert other.stderr.startswith("probe  place")
    assert other.words() == [[0, 0x33]]


def test_a_process_is_for_the_kernel(build: Builder, run: Runner) -> None:
    with running(build("many.c"), 1, "wait", stdin=subprocess.PIPE) as target:
        await_line(target)
        client, output = run.start("name = many\noffset = many_7\nminor = 1\nexit\n", ["-p", str(target.pid)], AUTO)
        await_attached(client)
        assert not is_traced(target.pid)
        assert target.stdin is not None
        target.stdin.close()
        assert target.wait(TIMEOUT) == 0
        result = read_result(client, output)
    assert result.stderr.startswith(chosen("ebpf", KERNEL))
    assert result.counts[1].hits == 1


def test_every_process_is_for_the_kernel_alone(build: Builder, run: Runner) -> None:
    client, output = run.start(TICK.format(name=f'"{build("hotloop.c")}"'), [], AUTO)
    await_attached(client)
    result = run.end(client, output)
    assert result.stderr.startswith(chosen("ebpf", "only it probes processes that it did not start or attach to"))


@pytest.fixture
def application(build: Builder) -> Path:
    """Return a program for the man page's example 1, whose main begins with the opcode that it names."""
    path = build("hotloop.c", "-O0", "-fcf-protection=none", name="appln")
    place = symbols_of(path)["main"]
    assert path.read_bytes()[place : place + 1] == b"\x55"
    return path


EXAMPLE_1 = (SEEDS / "man-example-1.rpn").read_text()
SEGMENTS = "'push u, ds' needs the segment registers other than cs and ss, which the ebpf engine lacks"


def test_example_1_of_the_man_page_is_for_ptrace(application: Path, run: Runner) -> None:
    result = run.command(EXAMPLE_1, application, 5, options=AUTO)
    assert result.stderr.startswith(chosen("ptrace", SEGMENTS))
    # ds on top, then cs, as the program has them: the selectors of user space.
    assert result.words() == [[0, 0x33]]


def test_example_1_is_for_ptrace_in_a_process_as_well(build: Builder, run: Runner) -> None:
    source = EXAMPLE_1.replace("appln", "waiting").replace("offset = main\nopcode = 0x55", "offset = many_7")
    with running(build("many.c", name="waiting"), 1, "wait", stdin=subprocess.PIPE) as target:
        await_line(target)
        client, output = run.start(source, ["-p", str(target.pid)], AUTO)
        await_message(client, SEGMENTS)
        await_breakpoint(target.pid, build("many.c", name="waiting"), "many_7")
        assert is_traced(target.pid)
        assert target.stdin is not None
        target.stdin.close()
        assert target.wait(TIMEOUT) == 0
        assert read_result(client, output).words() == [[0, 0x33]]


def test_example_1_in_every_process_is_refused(application: Path, run: Runner) -> None:
    result = run(EXAMPLE_1.replace("appln", f'"{application}"'), [], AUTO)
    assert result.status == 2
    assert f": error: {SEGMENTS}\n" in result.stderr
    assert "hint: use --engine ptrace" in result.stderr


def test_a_core_of_the_moment_before_is_not_for_the_kernel(build: Builder, run: Runner, tmp_path: Path) -> None:
    source = TICK.format(name="hotloop").replace("exit", "exit 3")
    result = run.command(source, build("hotloop.c"), 5, options=[*AUTO, "--allow-write", "--core-dir", str(tmp_path)])
    reason = "'exit 3' shows the state before the probed instruction only there; handlers run in the process"
    assert result.stderr.startswith(chosen("inline", reason))
    assert len(list(tmp_path.glob("core.dprobes.*"))) == 1


def test_a_process_that_gdb_has_is_for_the_kernel(build: Builder, run: Runner) -> None:
    if shutil.which("gdb") is None:
        pytest.skip("gdb is not installed")
    path = build("torture.c")
    source = "name = torture\noffset = emulated\nminor = 1\nmaxhits = 5\nexit\n"
    with running(path, 600, 1) as target:
        await_line(target)
        command = ["gdb", "-q", "-nx", "-p", str(target.pid), "-ex", "echo armed\\n", "-ex", "continue"]
        with running(*command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as debugger:
            while "armed" not in await_line(debugger):
                pass
            client, output = run.start(source, ["-p", str(target.pid)], AUTO)
            said = await_message(client, "note: engine")
            await_true(lambda: output.exists() and len(output.read_text().splitlines()) == 5, "five records")
            result = run.end(client, output)
    assert said == chosen("ebpf", f"the process is traced by process {debugger.pid} (gdb) already")
    assert result.counts[1].hits == 5


def test_what_is_not_there_yet_is_for_ptrace(build: Builder, run: Runner) -> None:
    script = f"'{build('hotloop.c')}' 5"
    result = run.command(TICK.format(name="hotloop"), "/bin/sh", "-c", script, options=AUTO)
    assert result.stderr.startswith(chosen("ptrace", "there is no module 'hotloop' on this machine yet"))
    assert result.counts[1].hits == 5


WITHOUT = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all")
MISSING = "the ebpf engine cannot work here: this user lacks CAP_BPF and CAP_PERFMON"


@pytest.mark.parametrize(
    ("handler", "engine", "reason"),
    [("", "inline", f"{MISSING}; handlers run in the process"), ("push uid\nlog 1\n", "ptrace", MISSING)],
)
def test_without_privileges_a_command_is_for_tracers(
    build: Builder, tmp_path: Path, handler: str, engine: str, reason: str
) -> None:
    source = tmp_path / "tick.rpn"
    source.write_text(TICK.format(name="hotloop").replace("exit\n", f"{handler}exit\n"))
    command = [str(build("hotloop.c")), "5"]
    words = [*WITHOUT, *DPROBES, "run", str(source), "-v", "--format", "json", "--", *command]
    for _ in range(2):  # the second time what was compiled may be known
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr.startswith(chosen(engine, reason))
        assert len(done.stdout.splitlines()) == 5  # what the program prints is with the messages


def test_without_privileges_every_process_is_refused(build: Builder, tmp_path: Path) -> None:
    source = tmp_path / "tick.rpn"
    source.write_text(TICK.format(name=f'"{build("hotloop.c")}"'))
    words = [*WITHOUT, *DPROBES, "run", str(source)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"dprobes: error: {MISSING}\n"
        "hint: run dprobes as root, or with CAP_BPF and CAP_PERFMON; -c and -p have an "
        "engine that needs neither\n"
    )


def test_without_privileges_samplers_are_refused_for_a_command_as_well() -> None:
    words = [*WITHOUT, *DPROBES, "run", "-e", "sample 99hz { @[comm] = count(); }", "--", "true"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"dprobes: error: {MISSING}\n"
        "hint: run dprobes as root, or with CAP_BPF and CAP_PERFMON; no engine that needs neither has sampler probes; "
        "probes on functions need neither, and 'perf record -p PID' samples your own processes\n"
    )
