"""The tasks of docs/how-to/coming-from.md: each line does what it says, by what is known of the programs otherwise."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from integration.support import TIMEOUT

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "coming-from.md").read_text()
_TASK = re.compile(r"^\*\*(?P<number>\d+)\. (?P<what>.*?)\*\*.*?^```\n(?P<lines>.*?)^```$", re.MULTILINE | re.DOTALL)
COUNT = 25


class Task(NamedTuple):
    """A line of the guide; ``peer`` is what people type today."""

    number: int
    words: list[str]
    needs_root: bool
    peer: str


def _tasks() -> list[Task]:
    found = []
    for match in _TASK.finditer(GUIDE):
        lines = match["lines"].splitlines()
        (ours,) = [line for line in lines if line.startswith(("$ ", "# "))]
        found.append(Task(int(match["number"]), shlex.split(ours[2:]), ours[0] == "#", "\n".join(lines[:-1])))
    return found


TASKS = {task.number: task for task in _tasks()}


ENGINES = ["ptrace", pytest.param("ebpf", marks=pytest.mark.skipif(os.geteuid() != 0, reason="ebpf needs root"))]
both_engines = pytest.mark.parametrize("engine", ENGINES)


def run(number: int, engine: str = "auto", *, status: int = 0) -> str:
    """Run the line of a task and return what it prints."""
    task = TASKS[number]
    if task.needs_root and os.geteuid() != 0:
        pytest.skip("this task needs root")
    command = task.words[task.words.index("--") + 1]
    if shutil.which(command) is None:
        pytest.skip(f"{command} is not installed")
    assert task.words[:2] == ["dprobes", "run"]
    done = subprocess.run(
        [sys.executable, "-m", "dprobes", "run", "--engine", engine, *task.words[2:]],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if "there is no module" in done.stderr or "is not on this machine" in done.stderr:
        pytest.skip(f"the module of task {number} is not on this machine")
    assert done.returncode == status, done.stderr
    return done.stdout


def numbers(pattern: str, text: str) -> list[int]:
    return [int(found) for found in re.findall(pattern, text)]


def test_there_are_as_many_tasks_as_the_guide_says() -> None:
    assert list(TASKS) == list(range(1, COUNT + 1))


def _translations() -> list[str]:
    """Return the programs in the last column of the guide's tables."""
    rows = re.findall(r"^\|(.*)\|$", GUIDE, re.MULTILINE)
    return [code for row in rows for code in re.findall(r"`([^`]+\{ [^`]+\})`", row.rsplit(" | ", 1)[-1])]


def test_each_tool_has_its_translations() -> None:
    for tool in ("bpftrace", "strace", "ltrace", "GDB", "SystemTap"):
        (section,) = re.findall(rf"^## From {tool}\n(.*?)^## ", GUIDE, re.MULTILINE | re.DOTALL)
        assert f"| {tool} | DProbes C |" in section
    assert len(_translations()) >= 20


PROGRAM = """
int total;
int main(int count, char **words) {
    int n;
    (void)words;





    for (n = 0; n < count; n++)
        total += n;
    return total;
}
"""
"""A program whose line 12 has a statement, for the places of the guide in ``./program``."""


@pytest.mark.parametrize("program", _translations())
def test_a_translation_is_free_of_errors(program: str, tmp_path: Path) -> None:
    if "./program" in program:
        if shutil.which("gcc") is None:
            pytest.skip("gcc is not installed")
        (tmp_path / "main.c").write_text(PROGRAM)
        subprocess.run(["gcc", "-g", "-o", "program", "main.c"], cwd=tmp_path, check=True, timeout=TIMEOUT)
    command = [sys.executable, "-m", "dprobes", "check", "--allow-write", "-e", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False, cwd=tmp_path)
    if "is not on this machine" in done.stderr or "no tracefs" in done.stderr:
        pytest.skip(done.stderr.splitlines()[0])
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "error" not in done.stderr
    assert "warning" not in done.stderr


def test_lines_are_not_longer_than_those_of_bpftrace() -> None:
    for task in TASKS.values():
        if task.peer.startswith("bpftrace"):
            peers = shlex.split(task.peer)[2]
            program = task.words[task.words.index("-e") + 1]
            assert len(program) <= len(peers) + 8, task.number


def test_files_opened() -> None:
    lines = [line.split("  ", 2)[2] for line in run(1).splitlines() if "cat[" in line]
    assert "/nowhere = -ENOENT" in lines
    assert any(re.fullmatch(r"/etc/hostname = \d+", line) for line in lines)


def test_programs_started() -> None:
    assert re.findall(r"starts (\S+)", run(2)) == ["/bin/true", "/bin/false"]


def test_system_calls_by_number() -> None:
    counts = dict(re.findall(r"^@\[(\d+)\]: (\d+)$", run(3), re.MULTILINE))
    assert counts["231"] == "1"  # exit_group
    assert int(counts["0"]) >= 2  # read


def test_sizes_of_reads() -> None:
    assert numbers(r"(\d+) in all", run(4))[0] >= 2


def test_signals() -> None:
    text = run(5)
    assert f"sh sends 10 to {text.splitlines()[0]}\n" in text


def test_context_switches() -> None:
    assert numbers(r"\[sleep\]: (\d+)", run(6))[0] >= 1


@both_engines
def test_arguments(engine: str) -> None:
    names = re.findall(r"getenv\((\w+)\)", run(7, engine))
    assert {"TZ", "QUOTING_STYLE"} <= set(names)


@both_engines
def test_results(engine: str) -> None:
    calls = re.findall(r"malloc\((\d+)\) = (0x[0-9a-f]+)", run(8, engine))
    assert len(calls) > 50
    assert all(int(block, 16) % 16 == 0 for _, block in calls)


@both_engines
def test_times_of_calls(engine: str) -> None:
    assert "4 in all" in run(9, engine)  # a row and the end, of two statements


@both_engines
def test_slow_calls(engine: str) -> None:
    (time,) = numbers(r"slept (\d+) ns", run(10, engine))
    assert time >= 20_000_000


@both_engines
def test_functions_used(engine: str) -> None:
    assert sum(numbers(r"^@\[.*\]: (\d+)$".replace("^", "(?m)^"), run(11, engine))) >= 10


@both_engines
def test_names_looked_up(engine: str) -> None:
    assert re.findall(r"looks up (\S+)", run(12, engine)) == ["localhost"]


@both_engines
def test_sql(engine: str) -> None:
    text = run(13, engine)
    assert "\n42\n" in f"\n{text}"
    assert "select 40 + 2;" in text


@both_engines
def test_bytes_hashed(engine: str) -> None:
    assert f"@bytes: {Path('/etc/passwd').stat().st_size}\n" in run(14, engine)


@both_engines
def test_lines_of_a_shell(engine: str) -> None:
    assert re.findall(r"runs (.*)", run(15, engine)) == ["echo a; echo b"]


def test_changes_of_a_variable() -> None:
    assert numbers(r"now (\d+) by ", run(16))[-2:] == [1, 3]


@both_engines
def test_exit_status(engine: str) -> None:
    assert numbers(r"ends with (\d+)", run(17, engine)) == [3]


@both_engines
def test_an_expression_at_an_instruction(engine: str) -> None:
    assert re.findall(r"\]  (0x[0-9a-f]+)$", run(18, engine), re.MULTILINE)


@both_engines
def test_call_stacks(engine: str) -> None:
    text = run(19, engine)
    assert all(size > 1024 for size in numbers(r"\]  (\d+) bytes", text))
    assert "    _IO_file_doallocate+" in text


@both_engines
def test_allocations_by_stack(engine: str) -> None:
    assert len(numbers(r"(?m)^\]: (\d+)$", run(20, engine))) == 5


@both_engines
def test_allocations_that_stay(engine: str) -> None:
    assert all(size > 0 for size in numbers(r"@live\[\d+\]: (\d+)", run(21, engine)))


def test_what_keeps_processors_busy() -> None:
    lines = run(22).splitlines()
    assert sum(int(line.rsplit(" ", 1)[1]) for line in lines) > 5
    assert all(";" in line for line in lines)


def test_where_it_waits() -> None:
    assert re.search(r";clock_nanosleep [1-9]\d*$", run(23), re.MULTILINE)


def test_a_function_that_is_skipped() -> None:
    assert run(24).splitlines()[0] == "12345"


def test_an_argument_that_is_changed() -> None:
    run(25, status=7)
