"""Whether a process may execute a file is answered as the text of its maps says."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.platform.linux import procfs
from dprobes.platform.linux.procfs import MapQuestion
from dprobes.target.process_maps import PROCMAP_QUERY

if TYPE_CHECKING:
    from collections.abc import Iterator

MANY = 1 << 16
NO_INODE = 0


def require_answers() -> None:
    if MapQuestion(NO_INODE, "nothing is called so").answer(os.getpid(), MANY) is None:
        pytest.skip("newer kernel: PROCMAP_QUERY is in Linux 6.11 and later")


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[bytes]]:
    """Give a process that has its libraries: it has answered."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"there\n")
        assert process.stdout.read(6) == b"there\n"
        yield process
        process.kill()


def executed(pid: int) -> dict[str, int]:
    """Return the files that a process executes, with the numbers of their inodes."""
    lines = (line.split(None, 5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return {line[5]: int(line[4]) for line in lines if "x" in line[1] and line[-1].startswith("/")}


def test_each_file_that_is_executed_is_found_by_its_number_and_by_its_name(waiting: subprocess.Popen[bytes]) -> None:
    require_answers()
    files = executed(waiting.pid)
    assert any("/libc" in name for name in files)
    for path, inode in files.items():
        assert MapQuestion(inode, "nothing is called so").answer(waiting.pid, MANY) is True
        assert MapQuestion(NO_INODE, Path(path).name).answer(waiting.pid, MANY) is True


def test_what_is_not_executed_is_not_found(waiting: subprocess.Popen[bytes]) -> None:
    require_answers()
    inode = Path("/proc/self/exe").stat().st_ino  # Python's
    assert MapQuestion(inode, "nothing is called so").answer(waiting.pid, MANY) is False
    assert MapQuestion(inode, "nothing is called so").answer(os.getpid(), MANY) is True


def test_by_numbers_alone_the_same_is_found(waiting: subprocess.Popen[bytes]) -> None:
    require_answers()
    for inode in executed(waiting.pid).values():
        assert MapQuestion(inode).answer(waiting.pid, MANY) is True
        assert MapQuestion(inode).answer(waiting.pid, 0) is None
    own = Path("/proc/self/exe").stat().st_ino
    assert MapQuestion(own).answer(waiting.pid, MANY) is False
    assert MapQuestion(own).answer(os.getpid(), MANY) is True


def test_names_are_asked_for_where_mappings_have_other_numbers(
    waiting: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    require_answers()
    for path, inode in executed(waiting.pid).items():
        assert MapQuestion.about(path, inode, "nothing is called so").answer(waiting.pid, MANY) is True
        assert MapQuestion.about(path, inode + 1, Path(path).name).answer(waiting.pid, MANY) is True
    empty = tmp_path / Path("/proc/self/exe").resolve().name
    empty.touch()
    for place in (empty, tmp_path, tmp_path / "missing"):
        assert MapQuestion.about(str(place), NO_INODE, empty.name).answer(os.getpid(), MANY) is True


def test_one_question_is_for_many_processes(waiting: subprocess.Popen[bytes]) -> None:
    require_answers()
    question = MapQuestion(NO_INODE, "python")
    assert [question.answer(pid, MANY) for pid in (os.getpid(), waiting.pid, os.getpid())] == [True, False, True]


def test_beyond_the_limit_there_is_no_answer(waiting: subprocess.Popen[bytes]) -> None:
    require_answers()
    count = len(executed(waiting.pid))
    question = MapQuestion(NO_INODE, "nothing is called so")
    assert question.answer(waiting.pid, 0) is None
    assert question.answer(waiting.pid, 1) is None
    assert question.answer(waiting.pid, count + 8) is False


def test_a_process_without_memory_is_no_process(waiting: subprocess.Popen[bytes]) -> None:
    require_answers()
    waiting.kill()
    os.waitid(os.P_PID, waiting.pid, os.WEXITED | os.WNOWAIT)  # it stays as a zombie
    with pytest.raises(ProcessLookupError):
        MapQuestion(NO_INODE, "cat").answer(waiting.pid, MANY)
    waiting.wait()
    with pytest.raises(ProcessLookupError):
        MapQuestion(NO_INODE, "cat").answer(waiting.pid, MANY)


def test_an_older_kernel_gives_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "PROCMAP_QUERY", PROCMAP_QUERY + 1)
    assert MapQuestion(NO_INODE, "python").answer(os.getpid(), MANY) is None
