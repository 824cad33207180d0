"""``exit N`` and ``skip`` of handlers in the process: the same as with breakpoints, for user and program."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from integration.support import (
    TIMEOUT,
    await_line,
    await_message,
    memory_at,
    read_result,
    running,
)

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Result, Runner

CODE = """
#include <pthread.h>
#include <stdio.h>
long cells[8];
__attribute__((noipa)) long tick(long a) { return a * 3 + 1; }
__attribute__((noipa)) void store(long *to, long a) { *to = a; }
static void *work(void *cell) { for (long i = 0; i < 1000; i++) { *(long *)cell += tick(i); } return 0; }
int main(void) {
    pthread_t threads[2];
    puts("ready"); fflush(stdout); getchar();
    for (int n = 0; n < 2; n++) pthread_create(threads + n, 0, work, cells + n);
    for (int n = 0; n < 2; n++) pthread_join(threads[n], 0);
    store(cells + 2, 5);
    printf("%ld %ld %ld\\n", cells[0], cells[1], cells[2]);
}
"""
TOTAL = 3 * 999 * 1000 // 2 + 1000
AT_500 = (
    "name = endings\noffset = tick\nminor = 1\npush r, rdi\npush 500\nsub\njnz no\npush r, rdi\nlog 1\n{}\nno: abort\n"
)
ENGINES = ("inline", "ptrace")
JUMPS = (b"\xe9", b"\x2e", b"\xeb")
"""First bytes of jumps: a near one, one with a prefix, a short one."""
GDB = "gdb -p %p -nx -batch" + "".join(
    f" -ex 'thread apply all {what}'" for what in ('printf "di=%%d\\n", $edi', "x/2i $pc", "bt")
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("endings")
    (directory / "a.c").write_text(CODE)
    subprocess.run(["gcc", "-O1", "-pthread", "-o", directory / "endings", directory / "a.c"], check=True)
    return directory / "endings"


def run_with(run: Runner, program: Path, source: str, engine: str, *options: str, **popen: Any) -> tuple[Result, str]:
    """Return the result, and what the program printed, which is probed before it begins."""
    with running(program, stdin=subprocess.PIPE) as target:
        await_line(target)
        client, output = run.start(
            source, ["-p", str(target.pid)], ["--engine", engine, "--allow-write", *options], **popen
        )
        await_message(client, "is active")
        has_jump = memory_at(target.pid, program, "store" if "store" in source else "tick", 1) in JUMPS
        assert has_jump is (engine == "inline")
        stdout, _ = target.communicate("!", timeout=TIMEOUT)
        assert target.returncode == 0
        return read_result(client, output), stdout


@pytest.mark.parametrize("engine", ENGINES)
def test_a_debugger_finds_the_thread_before_the_instruction(run: Runner, program: Path, engine: str) -> None:
    result, stdout = run_with(run, program, AT_500.format("exit 1"), engine, "--debugger", GDB)
    assert stdout == f"{TOTAL} {TOTAL} 5\n"
    assert "di=500\n" in result.stdout
    assert re.search(r"=> 0x\w+ <tick>:\tlea ", result.stdout)
    assert re.search(r"#0  0x\w+ in tick \(\)\n#1  0x\w+ in work ", result.stdout)
    assert "before the probed instruction: starting gdb" in result.stderr
    assert result.words() == [[500]]
    assert result.counts[1].records == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_a_core_file_is_of_the_program_without_us(run: Runner, program: Path, tmp_path: Path, engine: str) -> None:
    result, stdout = run_with(run, program, AT_500.format("exit 3"), engine, cwd=tmp_path)
    assert stdout == f"{TOTAL} {TOTAL} 5\n"
    (core,) = tmp_path.glob("core.dprobes.*")
    assert core.stat().st_size < 30 << 20  # there is no ring in it
    command = ["gdb", "-nx", "-batch", "-ex", "info registers rdi rip", "-ex", "x/2i $pc", "-ex", "bt"]
    done = subprocess.run([*command, program, core], capture_output=True, text=True, check=True, timeout=TIMEOUT)
    assert re.search(r"rdi +0x1f4 ", done.stdout)
    assert re.search(r"=> 0x\w+ <tick>:\tlea .*\n +0x\w+ <tick\+5>:\tret", done.stdout)
    assert re.search(r"#1  0x\w+ in work ", done.stdout)
    assert result.words() == [[500]]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_crash_dump_is_an_exit(run: Runner, program: Path, engine: str) -> None:
    result, stdout = run_with(run, program, AT_500.format("exit 2"), engine)
    assert stdout == f"{TOTAL} {TOTAL} 5\n"
    assert result.words() == [[500], [500]]
    assert result.counts[1].hits == 2000


@pytest.mark.parametrize("engine", ENGINES)
def test_a_function_is_skipped(run: Runner, program: Path, engine: str) -> None:
    result, stdout = run_with(run, program, AT_500.format("push -1\nskip"), engine)
    lost = 3 * 500 + 2
    assert stdout == f"{TOTAL - lost} {TOTAL - lost} 5\n"
    assert result.words() == [[500], [500]]
    assert (result.counts[1].hits, result.counts[1].records) == (2000, 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_function_is_skipped_whose_first_instruction_is_a_store(run: Runner, program: Path, engine: str) -> None:
    result, stdout = run_with(run, program, "name = endings\noffset = store\nminor = 1\npush 0\nskip\n", engine)
    assert stdout == f"{TOTAL} {TOTAL} 0\n"
    assert (result.counts[1].hits, result.counts[1].records) == (1, 1)


def test_threads_that_end_so_at_the_same_time_stop_the_process_once(run: Runner, program: Path) -> None:
    source = "name = endings\noffset = tick\nminor = 1\nexit 1\n"
    result, stdout = run_with(run, program, source, "inline", "--debugger", GDB)
    assert stdout == f"{TOTAL} {TOTAL} 5\n"
    assert result.stderr.count("before the probed instruction: starting gdb") == 1
    assert 1 <= result.counts[1].hits == result.counts[1].records <= 2
