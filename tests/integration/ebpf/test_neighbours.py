"""Other tools at the same place, other dprobes among them, and files that change while they are probed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.ebpf.objects import await_attached, await_gone, await_handlers, kernel_objects
from integration.support import (
    DPROBES,
    TIMEOUT,
    await_breakpoint,
    await_line,
    await_message,
    await_traced,
    code_is_original,
    memory_at,
    read_memory,
    running,
)

if TYPE_CHECKING:
    from integration.support import Builder, Result, Runner

ENGINE = ("--engine", "ebpf")
HOT = (*ENGINE, "--overhead", "off")
TICK = 'name = "{path}"\noffset = tick\nminor = 1\npush r, arg0\nlog 1\nexit\n'
# Hits by the million, which leave no records; in all processes they would be too many after some seconds.
EMULATED = 'name = "{path}"\noffset = emulated\nminor = 1\npasscount = 2000000000\nexit\n'


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


def call(program: Path, count: int) -> None:
    subprocess.run([program, str(count)], check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT)


def numbers(result: Result) -> list[int]:
    return [words[0] for words in result.words()]


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_two_runs_at_one_place_count_each_for_itself(build: Builder, run: Runner, first_to_end: int) -> None:
    program = build("hotloop.c")
    first = run.start(TICK.format(path=program), [], ENGINE)
    await_attached(first[0])
    call(program, 10)
    second = run.start(TICK.format(path=program), [], ENGINE)
    await_attached(second[0])
    call(program, 20)
    ending, staying = (first, second) if first_to_end == 0 else (second, first)
    objects = kernel_objects(ending[0].pid)
    ended = run.end(*ending)
    await_gone(objects)
    call(program, 5)
    stayed = run.end(*staying)
    seen = [list(range(10)) + list(range(20)), list(range(20))]
    assert numbers(ended) == seen[first_to_end]
    assert numbers(stayed) == seen[1 - first_to_end] + list(range(5))


def test_the_breakpoint_stays_as_long_as_a_run_needs_it(build: Builder, run: Runner) -> None:
    path = build("torture.c")
    with running(path, 600, 1) as target:
        await_line(target)
        clients = [run.start(EMULATED.format(path=path), options, HOT) for options in ([], ["-p", str(target.pid)])]
        for client, _ in clients:
            await_attached(client)
        await_breakpoint(target.pid, path, "emulated")
        assert run.end(*clients[0]).counts[1].hits > 0
        assert memory_at(target.pid, path, "emulated", 1) == b"\xcc"
        assert run.end(*clients[1]).counts[1].hits > 0
        assert code_is_original(target.pid, path)


def end_after(run: Runner, client: tuple[subprocess.Popen[str], Path], text: str) -> Result:
    """End a client when it has said something, and return its result with all that it said."""
    process, output = client
    said = await_message(process, text)
    await_handlers(process)
    result = run.end(process, output)
    result.stderr = said + result.stderr
    return result


def test_the_tracer_finds_the_breakpoint_of_the_kernel(build: Builder, run: Runner) -> None:
    path = build("torture.c")
    with running(path, 600, 1) as target:
        await_line(target)
        # With a umask it is executed, not forked (``forked_starts``): others know a dprobes by its command line.
        client, output = run.start(EMULATED.format(path=path), [], HOT, umask=0o022)
        await_attached(client)
        await_breakpoint(target.pid, path, "emulated")
        other = run.start(EMULATED.format(path=path), ["-p", str(target.pid), "--no-follow"], ["--engine", "ptrace"])
        result = end_after(run, other, "the breakpoint may be")
        assert run.end(client, output).counts[1].hits > 0
    message = f"CONFLICT in process {target.pid}: a breakpoint of another tool is at offset {OFFSET} of '{path}'"
    expect_conflict(result, message)
    holder = f"process {client.pid} is a dprobes with uprobes: the breakpoint may be one of them"
    assert f"dprobes: note: {holder}\n" in result.stderr


OFFSET = "0x[0-9a-f]+"


def expect_conflict(result: Result, message: str) -> None:
    assert result.status == 1
    assert re.search(f"^dprobes: warning: {message}; not inserted there$", result.stderr, re.MULTILINE), result.stderr
    assert result.stderr.endswith("dprobes: error: no probepoint was inserted\n")
    assert result.records == []


def test_the_kernel_leaves_the_breakpoint_of_the_tracer_alone(build: Builder, run: Runner) -> None:
    path = build("torture.c")
    with running(path, 600, 1) as target:
        await_line(target)
        client, output = run.start(EMULATED.format(path=path), ["-p", str(target.pid)], ["--engine", "ptrace"])
        await_traced(target.pid)
        await_breakpoint(target.pid, path, "emulated")
        owner = rf"the dprobes of process {client.pid}, which began with a program for '{path}'"
        where = rf"{owner}, is there: offset {OFFSET} of '{path}'"
        for scope in ([], ["-p", str(target.pid)]):
            other = end_after(run, run.start(EMULATED.format(path=path), scope, ENGINE), "CONFLICT")
            expect_conflict(other, f"CONFLICT in process {target.pid}: a breakpoint of {where}")
        assert memory_at(target.pid, path, "emulated", 1) == b"\xcc"
        assert run.end(client, output).counts[1].hits > 0
        assert code_is_original(target.pid, path)


def test_a_breakpoint_of_gdb_is_a_conflict_and_stays(build: Builder, run: Runner) -> None:
    if shutil.which("gdb") is None:
        pytest.skip("gdb is not installed")
    path = build("torture.c")
    with running(path, 600, 1) as target:
        await_line(target)
        words = ["break *emulated", "ignore 1 100000000", "continue"]
        command = ["gdb", "-q", "-nx", "-p", str(target.pid), *(w for word in words for w in ("-ex", word))]
        with running(*command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as debugger:
            await_breakpoint(target.pid, path, "emulated")
            where = rf"process {debugger.pid} \(gdb\) is there: offset {OFFSET} of '{path}'"
            for scope in ([], ["-p", str(target.pid)]):
                other = end_after(run, run.start(EMULATED.format(path=path), scope, ENGINE), "CONFLICT")
                expect_conflict(other, f"CONFLICT in process {target.pid}: a breakpoint of {where}")
            assert memory_at(target.pid, path, "emulated", 1) == b"\xcc"
            assert debugger.poll() is None


def test_another_opcode_is_a_mismatch(build: Builder, run: Runner) -> None:
    program = build("hotloop.c")
    source = TICK.format(path=program).replace("minor", "opcode = 0x55\nminor")
    result = run(source, ["--", str(program), "5"], ENGINE)
    assert result.status == 1
    assert re.search(r"^\S+:3:1: warning: MISMATCH: opcode 0x48 \(.*\) is there, not 0x55; not inserted$",
                     result.stderr, re.MULTILINE), result.stderr  # fmt: skip
    assert result.stderr.endswith("dprobes: error: no probepoint was inserted\n")
    assert (result.stdout, result.records) == ("10\n", [])


@pytest.mark.parametrize("way", ["deleted", "replaced", "renamed"])
def test_a_file_may_go_while_it_is_probed(build: Builder, run: Runner, tmp_path: Path, way: str) -> None:
    """Processes that execute it are hit on; what takes its name is another file."""
    program = Path(shutil.copy(build("torture.c"), tmp_path / "torture"))
    with running(program, 600, 1) as target:
        await_line(target)
        before = code_of(target.pid)
        client, output = run.start(EMULATED.format(path=program), [], HOT)
        objects = await_attached(client)
        await_breakpoint(target.pid, program, "emulated")
        if way == "renamed":
            program.rename(tmp_path / "other")
        else:
            program.unlink()
        if way == "replaced":
            shutil.copy(build("hotloop.c"), program)
            call(program, 5)
        result = run.end(client, output)
        assert result.status == 0, result.stderr
        assert result.counts[1].hits == result.counts[1].passed > 0
        await_gone(objects)
        assert code_of(target.pid) == before
        assert target.poll() is None


def code_of(pid: int) -> list[bytes]:
    """Return what a process executes from its program's file, whatever that is called now."""
    inode = Path(f"/proc/{pid}/exe").stat().st_ino
    rows = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    areas = [row[0].split("-") for row in rows if "x" in row[1] and int(row[4]) == inode]
    return [read_memory(pid, int(start, 16), int(end, 16) - int(start, 16)) for start, end in areas]


def test_a_file_that_may_not_be_read_is_named(build: Builder, tmp_path: Path) -> None:
    """Another user's, for one that may use BPF and not much else."""
    program = Path(shutil.copy(build("hotloop.c"), tmp_path / "hotloop"))
    source = tmp_path / "tick.rpn"
    source.write_text(TICK.format(path=program))
    program.chmod(0o711)
    shutil.chown(program, 65534)
    caps = "-all,+bpf,+perfmon"
    words = ["setpriv", f"--bounding-set={caps}", f"--inh-caps={caps}", f"--ambient-caps={caps}"]
    done = subprocess.run(
        [*words, *DPROBES, "run", source, *ENGINE], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{source}:1:1: error: '{program}' cannot be read: permission denied\n")


def test_a_return_that_no_uretprobe_can_serve_is_refused_with_the_reason(build: Builder, run: Runner) -> None:
    program = build("returns.c", "-O2")
    result = run("name = returns\noffset = even\nreturn = yes\nexit\n", ["--", str(program)], ENGINE)
    assert result.status == 2
    assert re.search(
        r"error: the ebpf engine cannot probe the return of even: it may hand over to another function, and a "
        r"uretprobe cannot be put on its first instruction 'lock .*': the kernel puts no uprobe on instructions with "
        r"the prefix 'lock'\n",
        result.stderr,
    ), result.stderr
