"""``exit 3``: the core of a process that goes on, as gdb and readelf see it, beside what the program itself printed."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.support import (
    TIMEOUT,
    await_line,
    await_message,
    await_traced,
    await_true,
    children_of,
    code_is_original,
    is_traced,
    kernel_state,
    read_result,
    running,
)

if TYPE_CHECKING:
    from integration.support import Builder, Runner

ELF_PRARGSZ = 80 - 1
"""How much of a command line a core file holds (include/uapi/linux/elfcore.h), without its NUL."""

TURN = "name = handover\noffset = turn\nminor = 1\npush r, pc\nlog 1\nexit 3\n"
TICK = "offset = tick\nminor = 2\npush tid\nlog 1\nexit\n"
HOT = (
    "name = torture\noffset = stepped\npasscount = 100\nminor = 1\n"
    "push pid\npush {}\nsub\njz this\nabort\nthis: exit 3\n"
)


def gdb(program: Path, core: Path, *commands: str) -> str:
    arguments = [part for command in commands for part in ("-ex", command)]
    done = subprocess.run(
        ["gdb", "-nx", "-batch", "-ex", "set pagination off", *arguments, str(program), str(core)],
        check=True,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    return done.stdout + "\n".join(line for line in done.stderr.splitlines() if "annot access" in line)


def only_core(directory: Path) -> Path:
    (core,) = directory.glob("core.dprobes.*")
    return core


def first_bytes(program: Path, symbol: str) -> str:
    """Return the first four bytes of a function in a file, as gdb shows them."""
    text = subprocess.run(
        ["gdb", "-nx", "-batch", "-ex", f"x/4xb {symbol}", str(program)], check=True, capture_output=True, text=True
    ).stdout
    return text.split(":", 1)[1].strip()


@pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])
def test_gdb_reads_the_core_and_the_program_goes_on(build: Builder, run: Runner, tmp_path: Path, i386: bool) -> None:
    program = build("handover.c", i386=i386)
    result = run(TURN + TICK, ["--exit-status", "--", str(program), "3", "4000"], ["--allow-write"], cwd=tmp_path)
    assert result.status == 0, result.stdout + result.stderr
    printed, sums = result.stdout.splitlines()
    assert sums == "12000 0"
    pid, turn, text, answer, anonymous = printed.split()
    core = tmp_path / f"core.dprobes.{pid}"
    size = core.stat().st_size
    assert f"note: the core of process {pid} (handover) is in './core.dprobes.{pid}' ({size} bytes)" in result.stderr
    assert core.stat().st_blocks * 512 < size / 2  # sparse
    assert core.stat().st_mode & 0o777 == 0o600

    (record,) = [r for r in result.records if r["minor"] == 1]
    shown = gdb(
        program, core, "print/x $pc", "x/6xb $pc", "bt", f"x/s {text}", f"print *(unsigned long *){answer}",
        f"x/s {anonymous}+12345", "info threads", "x/4xb tick", "print $_siginfo.si_signo",
        "print/x $_siginfo._sifields._sigfault.si_addr", "info proc", "print $sp", "print $fctrl",
    )  # fmt: skip
    assert f"$1 = {turn}" in shown
    assert int(turn, 16) == record["ip"]
    assert "<turn>:\t0xb8\t0x87\t0xd6\t0x12\t0x00\t0x90" in shown
    assert re.search(r"#0 .* in turn \(\)\n#1 .* in outer .*\n(#[234] .*\n)+#5 .* in main ", shown)
    assert f'{text}:\t"on the stack"' in shown
    assert "$2 = 42" in shown
    assert '"in anonymous memory"' in shown
    threads = re.findall(r"^[* ] \d+ +(?:Thread|LWP).*$", shown, re.MULTILINE)
    assert len(threads) == 4
    assert threads[0].startswith("* 1")
    assert pid in threads[0]
    assert len({re.search(r"LWP (\d+)", thread)[1] for thread in threads}) == 4  # type: ignore[index]
    # The breakpoint at tick() was in memory at that moment; it does not show.
    assert result.counts[2].hits > 0
    assert first_bytes(program, "tick") in shown
    assert "0xcc" not in shown
    assert "$3 = 5" in shown
    assert f"$4 = {turn}" in shown
    assert f"exe = '{f'{program} 3 4000'[:ELF_PRARGSZ]}" in shown
    # GDB 13 does not know the XSAVE layout of some processors, and then gives up on an i386 program's FPU.
    assert "$6 = 895" in shown or (i386 and "$6 = <unavailable>" in shown)

    header = subprocess.run(["readelf", "-hW", core], check=True, capture_output=True, text=True).stdout
    assert ("ELF32" if i386 else "ELF64") in header
    assert ("Intel 80386" if i386 else "X86-64") in header
    assert "CORE (Core file)" in header
    done = subprocess.run(["readelf", "-nW", core], check=True, capture_output=True, text=True)
    assert "rror" not in done.stderr
    kinds = re.findall(r"(NT_\w+)", done.stdout)
    expected = {"NT_PRSTATUS", "NT_PRPSINFO", "NT_SIGINFO", "NT_AUXV", "NT_FILE", "NT_FPREGSET", "NT_X86_XSTATE"}
    assert expected <= set(kinds)
    assert kinds.count("NT_PRSTATUS") == 4


def test_registers_are_those_of_the_hit(build: Builder, run: Runner, tmp_path: Path) -> None:
    program = build("handover.c")
    names = ("rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rbp", "rsp", "r8", "r12", "r15", "rip")
    source = "name = handover\noffset = turn\nminor = 1\n" + "".join(f"push r, {name}\n" for name in names)
    result = run.command(f"{source}log {len(names)}\nexit 3\n", program, 0, options=["--allow-write"], cwd=tmp_path)
    shown = gdb(
        program,
        only_core(tmp_path),
        'printf "values' + " %lu" * len(names) + '\\n", ' + ", ".join(f"(unsigned long)${name}" for name in names),
    )
    values = [int(value) for value in re.findall(r"^values (.*)$", shown, re.MULTILINE)[0].split()]
    assert values == result.words()[0][::-1]


def test_the_core_is_filtered_as_the_process_wants(build: Builder, run: Runner, tmp_path: Path) -> None:
    program = build("handover.c")
    script = f"echo 0x10 > /proc/self/coredump_filter; exec {program} 0"
    result = run(TURN, ["--exit-status", "--", "sh", "-c", script], ["--allow-write"], cwd=tmp_path)
    assert result.status == 0, result.stderr
    *_, anonymous = result.stdout.split("\n")[0].split()
    shown = gdb(program, only_core(tmp_path), "bt", f"x/s {anonymous}+12345", "x/s anonymous")
    assert "annot access memory" in shown
    assert "in anonymous memory" not in shown
    # The first page of the program is there, and so is its build-id.
    headers = subprocess.run(["readelf", "-lW", only_core(tmp_path)], check=True, capture_output=True, text=True).stdout
    assert {row.split()[4] for row in headers.splitlines() if "LOAD" in row} >= {"0x001000", "0x000000"}


def test_a_core_file_is_never_overwritten(build: Builder, run: Runner, tmp_path: Path) -> None:
    program = build("torture.c")
    directory = tmp_path / "cores"
    directory.mkdir()
    with running(program, 600, 3) as target:
        await_line(target)
        present = [directory / f"core.dprobes.{target.pid}", directory / f"core.dprobes.{target.pid}.1"]
        for path in present:
            path.write_text("precious")
        process, output = run.start(
            HOT.format(target.pid), ["-p", str(target.pid)], ["--allow-write", "--core-dir", str(directory)]
        )
        core = directory / f"core.dprobes.{target.pid}.2"
        await_true(core.exists, "the core file")
        assert process.stderr is not None
        await_message(process, "is in")
        process.send_signal(signal.SIGINT)
        result = read_result(process, output)
        assert result.status == 0, result.stderr
        assert [path.read_text() for path in present] == ["precious", "precious"]
        assert "\n#0  stepped (" in gdb(program, core, "bt")
        assert not is_traced(target.pid)
        assert code_is_original(target.pid, program)
        target.send_signal(signal.SIGUSR2)
        assert target.wait(TIMEOUT) == 0


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))


def test_a_core_that_cannot_be_finished_is_taken_away(build: Builder, run: Runner, tmp_path: Path) -> None:
    # A full disk fails at the same place.
    result = run(
        TURN,
        ["--exit-status", "--", str(build("handover.c")), "1", "10"],
        ["--allow-write"],
        cwd=tmp_path,
        preexec_fn=limit_files,
    )
    assert result.status == 0, result.stderr
    assert re.search(
        r"warning: no core of process \d+ \(handover\) in './core\.dprobes\.\d+': file too large; "
        "the process continues",
        result.stderr,
    )
    assert list(tmp_path.glob("core*")) == []
    assert result.counts[1].records == 1


def test_a_directory_that_takes_no_files(build: Builder, run: Runner) -> None:
    options = ["--allow-write", "--core-dir", "/proc"]
    result = run(TURN, ["--exit-status", "--", str(build("handover.c")), "1", "10"], options)
    assert result.status == 0, result.stderr
    assert re.search(
        r"no core of process \d+ \(handover\) in '/proc/core\.dprobes\.\d+': .*; the process continues", result.stderr
    )


def writer_of(client: int) -> int:
    """Wait for the process that writes a core file, a child of the tracer, and stop it."""
    found: list[int] = []

    def look() -> bool:
        found[:] = [w for tracer in children_of(client) for w in children_of(tracer)]
        return bool(found)

    until = "the process that writes the core file"
    await_true(look, until)
    os.kill(found[0], signal.SIGSTOP)
    return found[0]


@pytest.mark.parametrize("how", ["the writer is killed", "Ctrl-C", "the client is killed"])
def test_all_threads_are_held_while_the_core_is_written(build: Builder, run: Runner, tmp_path: Path, how: str) -> None:
    program = build("handover.c")
    gate = f"read line; exec {program} 2 2000"
    with running("sh", "-c", gate, stdin=subprocess.PIPE, env={**os.environ, "MEGABYTES": "100"}) as target:
        process, output = run.start(TURN + TICK, ["-p", str(target.pid)], ["--allow-write"], cwd=tmp_path)
        await_traced(target.pid)
        assert target.stdin is not None
        target.stdin.write("go\n")
        target.stdin.flush()
        writer = writer_of(process.pid)
        await_true(lambda: kernel_state(writer) == "T", "the stop of the writer")
        threads = Path(f"/proc/{target.pid}/task")
        # On a busy machine a thread that is to stop may not have had a processor yet.
        await_true(lambda: {kernel_state(int(t.name)) for t in threads.iterdir()} == {"t"}, "the stop of all threads")
        if how == "the writer is killed":
            os.kill(writer, signal.SIGKILL)
        elif how == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        else:
            process.send_signal(signal.SIGKILL)
        assert target.wait(TIMEOUT) == 0
        if how == "the client is killed":
            process.communicate(timeout=TIMEOUT)  # its output may end within a record
        else:
            result = read_result(process, output)
    if how != "the client is killed":
        reason = {
            "the writer is killed": "the process that wrote it was killed",
            "Ctrl-C": "the run ended before it was complete",
        }[how]
        assert f"no core of process {target.pid} (handover) in './core.dprobes.{target.pid}': {reason}" in result.stderr
        assert result.counts[1].records == 1
    if how == "the writer is killed":
        assert result.counts[2].hits == 4000  # what the threads had stopped for was not lost
    assert list(tmp_path.glob("core*")) == []


def test_the_other_processes_go_on_meanwhile(build: Builder, run: Runner, tmp_path: Path) -> None:
    program = build("handover.c")
    script = f"{program} 2 1000 > /dev/null & {program} 2 1000 > /dev/null && wait $!"
    result = run(TURN + TICK, ["--exit-status", "--", "sh", "-c", script], ["--allow-write"], cwd=tmp_path)
    assert result.status == 0, result.stderr
    assert result.counts[1].hits == 1
    assert result.counts[2].hits == 4000
    assert only_core(tmp_path).stat().st_size > 0


def test_a_vfork_child_leaves_a_core(build: Builder, run: Runner, tmp_path: Path) -> None:
    program = build("handover.c")
    result = run(
        TURN + TICK, ["--exit-status", "--", str(program), "0", "50", "vfork"], ["--allow-write"], cwd=tmp_path
    )
    assert result.status == 0, result.stderr
    assert result.counts[2].hits == 50
    assert "turn" in gdb(program, only_core(tmp_path), "bt")


def test_exit_2_is_an_exit_with_a_warning(build: Builder, run: Runner) -> None:
    program = build("hotloop.c")
    source = "name = hotloop\noffset = tick\nminor = 1\npush 1\nlog 1\nexit 2\n"
    result = run(source, ["--exit-status", "--", str(program), "9"], ["--allow-write"])
    assert result.status == 0, result.stderr
    assert "warning: 'exit 2' (crash dump) is for kernel probes; here it acts as 'exit'" in result.stderr
    assert result.counts[1].hits == result.counts[1].records == 9
