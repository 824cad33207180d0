"""Runs of the eBPF engine on real programs: exact counts, scopes, ways out, and nothing left behind."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.ebpf.objects import await_attached, is_attached
from integration.support import (
    DPROBES,
    NOBODY,
    TIMEOUT,
    await_breakpoint,
    await_line,
    await_true,
    code_is_original,
    read_result,
    running,
)

if TYPE_CHECKING:
    from integration.support import Builder, Result, Runner

HOTLOOP = "name = {path}\noffset = tick\nminor = 1\npush r, arg0\nlog 1\nexit\n"
THREADS = "name = threads\nvars = 1\noffset = tick\nminor = 1\ninc lv, 0\npush lv, 0\nlog 1\nexit\n"
FAULTS = "name = faults\noffset = at_{kind}\nminor = 1\n{extra}push r, eip\nlog 1\nexit\n"


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


def ebpf(run: Runner, program: str, *target: object, options: tuple[str, ...] = ()) -> Result:
    """Run a program on a command that must end well."""
    result = run(program, ["--exit-status", "--", *map(str, target)], ["--engine", "ebpf", *options])
    assert result.status == 0, result.stderr + result.stdout
    return result


def start(run: Runner, program: str, *options: str) -> tuple[subprocess.Popen[str], Path]:
    return run.start(program, [], ["--engine", "ebpf", *options])


@pytest.mark.parametrize("kind", ["-pie", "-no-pie", "-static"])
@pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])
def test_each_call_is_one_record_with_its_argument(build: Builder, run: Runner, kind: str, i386: bool) -> None:
    program = build("hotloop.c", kind, i386=i386)
    result = ebpf(run, HOTLOOP.format(path="hotloop"), program, 500)
    assert [words[0] for words in result.words(size=4 if i386 else 8)] == list(range(500))
    assert (result.counts[1].hits, result.counts[1].records) == (500, 500)


def test_threads_miss_nothing(build: Builder, run: Runner) -> None:
    result = ebpf(run, THREADS, build("threads.c"), 8, 2000)
    assert result.stdout == "16000\n"
    assert result.counts[1].hits == result.counts[1].records == len(result.records) == 16000
    # The variable is shared: what each hit read lies between its own increment and the next look.
    values = sorted(words[0] for words in result.words())
    assert values[-1] == 16000
    assert len({r["tid"] for r in result.records}) == 8


@pytest.mark.parametrize(("limit", "first"), [(100, 0), (1, 0), (70, 30)])
def test_maxhits_and_passcount_are_exact_under_threads(build: Builder, run: Runner, limit: int, first: int) -> None:
    limits = f"minor = 1\nmaxhits = {limit}\npasscount = {first}\n"
    result = ebpf(run, THREADS.replace("minor = 1\n", limits), build("threads.c"), 4, 2000)
    assert result.stdout == "8000\n"
    assert len(result.records) == limit
    assert (result.counts[1].hits, result.counts[1].passed) == (limit + first, first)


@pytest.mark.alone
def test_what_the_command_does_before_its_exec_is_not_hit(run: Runner) -> None:
    """The child of dprobes runs Python, and with that the very library, until it executes the command."""
    result = ebpf(run, 'name = "libc.so.6"\noffset = execve\nminor = 1\nexit\n', "true")
    assert result.records == []
    assert result.counts[1].hits == 0


@pytest.mark.parametrize("kind", ["protected", "pointer", "divide", "bus", "stack"])
def test_an_instruction_that_faults_leaves_no_record(build: Builder, run: Runner, kind: str) -> None:
    program = build("faults.c")
    result = ebpf(run, FAULTS.format(kind=kind, extra=""), program, kind, 20)
    assert result.counts[1].hits == result.counts[1].records == len(result.records) == 20
    kept = ebpf(run, FAULTS.format(kind=kind, extra="logonfault = yes\n"), program, kind, 20)
    assert kept.counts[1].hits == len(kept.records) == 20 + int(kept.stdout)


def test_every_process_that_maps_the_file_is_hit(build: Builder, run: Runner) -> None:
    """One runs before the run begins, others are started later, none by dprobes."""
    program = build("hotloop.c")
    torture = build("torture.c")
    with running(torture, 600, 1) as target:
        await_line(target)
        source = f'name = "{torture}"\noffset = emulated\nminor = 1\npasscount = 1000000000\nexit\n'
        client, output = start(run, source, "--overhead", "off")  # it is hit a million times a second
        await_attached(client)
        await_breakpoint(target.pid, torture, "emulated")
        assert run.end(client, output).counts[1].passed > 0
        await_true(lambda: code_is_original(target.pid, torture), "the original code")
        other, records = start(run, HOTLOOP.format(path=f'"{program}"'))
        await_attached(other)
        done = [subprocess.run([program, "30"], check=True, stdout=subprocess.DEVNULL) for _ in range(3)]
        result = run.end(other, records)
    assert len(done) == 3
    assert sorted(words[0] for words in result.words()) == sorted(list(range(30)) * 3)
    assert len({r["pid"] for r in result.records}) == 3


def test_only_processes_of_the_user_are_hit(build: Builder, run: Runner) -> None:
    program = build("hotloop.c")
    client, output = start(run, HOTLOOP.format(path=f'"{program}"'), "--uid", "nobody")
    await_attached(client)
    for user in (None, NOBODY):
        subprocess.run([program, "20"], check=True, stdout=subprocess.DEVNULL, user=user)
    result = run.end(client, output)
    assert {r["uid"] for r in result.records} == {NOBODY}
    assert result.counts[1].hits == 20


def test_a_process_is_probed_with_the_children_that_it_has_and_gets(build: Builder, run: Runner) -> None:
    program = build("hotloop.c")
    script = f"(read x; exec {program} 10) <&3 & read y; {program} 20; wait"
    with running("bash", "-c", "exec 3<&0; " + script, stdin=subprocess.PIPE) as shell:
        await_true(lambda: _has_children(shell.pid), "the child")
        client, output = start(run, HOTLOOP.format(path=f'"{program}"'), "-p", str(shell.pid))
        await_attached(client)
        subprocess.run([program, "30"], check=True, stdout=subprocess.DEVNULL)
        assert shell.stdin is not None
        shell.stdin.write("x\ny\n")
        shell.stdin.close()
        shell.wait(TIMEOUT)
        result = read_result(client, output)  # it ends with the last process
    assert result.counts[1].hits == 30


def _has_children(pid: int) -> bool:
    return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


@pytest.mark.parametrize("way", ["maxhits", "remove"])
def test_a_probepoint_that_ended_leaves_no_breakpoint(build: Builder, run: Runner, way: str) -> None:
    program = build("torture.c")
    limit, ending = ("maxhits = 3\n", "exit") if way == "maxhits" else ("", "remove")
    with running(program, 600, 1) as target:
        await_line(target)
        source = f"name = torture\noffset = emulated\nminor = 1\n{limit}push 1\nlog 1\n{ending}\n"
        client, output = start(run, source, "-p", str(target.pid))
        await_true(lambda: output.exists() and bool(output.read_text()), "a record")
        await_true(lambda: code_is_original(target.pid, program), "the original code")
        assert not is_attached(client.pid)
        result = run.end(client, output)
    assert len(result.records) == (3 if way == "maxhits" else 1)


def test_what_a_pattern_found_is_taken_away_one_by_one(build: Builder, run: Runner) -> None:
    program = build("many.c")
    source = "name = many\noffset = many_1*\nminor = 1\nmaxhits = 2\nexit\n"
    result = ebpf(run, source, program, 5)
    count = 1 + 10 + 100 + 1000
    assert len(result.records) == 2 * count
    names = [r["function"] for r in result.records]
    assert sorted(set(names)) == sorted(f"many_{n}" for n in range(10000) if str(n).startswith("1"))


def test_a_full_ring_loses_records_and_says_how_many(build: Builder, run: Runner) -> None:
    source = "name = threads\nlogmax = 4096\noffset = tick\nminor = 1\npush 2000\npush r, sp\nlog mrf\nexit\n"
    result = ebpf(run, source, build("threads.c"), 4, 20000, options=("--ring-size", "1"))
    counts = result.counts[1]
    assert counts.hits == counts.records + counts.lost == 80000
    assert len(result.records) == counts.records


def test_instructions_that_uprobes_cannot_serve_are_refused(build: Builder, run: Runner) -> None:
    program = build("insns.c")
    result = run("name = insns\noffset = site_locked\nexit\n", ["--", str(program), "5"], ["--engine", "ebpf"])
    assert result.status == 2
    assert "the kernel puts no uprobe on" in result.stderr
    assert "hint: use --engine ptrace with -c COMMAND or -p PID" in result.stderr
    taken = run(
        "name = insns\noffset = site_locked\nminor = 1\nexit\n", ["--", str(program), "5"], ["--engine", "auto", "-v"]
    )
    assert taken.status == 0
    assert "dprobes: note: engine inline: the ebpf engine cannot probe " in taken.stderr
    assert taken.counts[1].hits == 5


def test_what_is_not_caught_is_said(build: Builder, run: Runner) -> None:
    source = "name = hotloop\noffset = tick\nminor = 1\npush 0\npush mem, u32\nexit\n"
    result = ebpf(run, source, build("hotloop.c"), 5)
    assert "the handler of 0,1 was ended by INVALID_ADDR, which nothing catches" in result.stderr


def test_a_record_of_some_process_says_which_one(build: Builder, tmp_path: Path) -> None:
    program = tmp_path / "tick.rpn"
    hotloop = build("hotloop.c", name="hotloop_named")
    program.write_text(HOTLOOP.format(path=f'"{hotloop}"'))
    command = [*DPROBES, "run", "--engine", "ebpf", program]
    with running(*command, stderr=subprocess.PIPE) as tracing, running(hotloop, 1 << 40) as probed:
        first = await_line(tracing)
        tracing.send_signal(signal.SIGINT)
        tracing.communicate(timeout=TIMEOUT)
    assert f"hotloop_named[{probed.pid}]" in first


def test_a_module_that_nobody_has_is_an_error(run: Runner) -> None:
    for name, hint in (
        ("libc", "did you mean 'libc.so.6'?"),
        ("no-such-module", "the ebpf engine probes files: one must be there when the run begins"),
    ):
        result = run(f'name = "{name}"\noffset = malloc\nexit\n', [], ["--engine", "ebpf"])
        message = f"dprobes: error: there is no module '{name}' on this machine, and no process executes one\n"
        assert (result.status, result.stderr) == (1, f"{message}hint: {hint}\n")
