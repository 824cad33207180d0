"""Following a trace through its files: nothing is left out or seen twice, whatever a limited writer does meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dprobes.errors import FormatError
from dprobes.trace.trace_content import LostRecords, RecordBlock
from dprobes.trace.trace_reader import MissingPart, TraceFollower
from dprobes.trace.trace_writer import TraceFileWriter, older_part
from support.trace_files import header, program, records

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 8_000
RECORD = 400
"""Bytes of a record: some ten fit into one of the two files."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.dpt"


def numbers(follower: TraceFollower, problems: list[str] | None = None) -> list[int]:
    result = []
    for found in follower.poll():
        if isinstance(found, MissingPart):
            assert problems is not None, found.message
            problems.append(found.message)
            continue
        assert isinstance(found, RecordBlock)
        result += [int.from_bytes(each.record[:4], "little") for each in found]
    return result


class Numbering:
    """Write records that are numbered."""

    def __init__(self, path: Path) -> None:
        self.writer = TraceFileWriter(path, LIMIT)
        self._program = self.writer.add_program("app", 1, {})
        self.next = 0

    def write(self, count: int) -> None:
        for _ in range(count):
            self.writer.write(self._program, [(0, self.next.to_bytes(4, "little") + bytes(RECORD - 4))])
            self.next += 1


def test_the_older_part_comes_first(path: Path) -> None:
    numbering = Numbering(path)
    numbering.write(15)
    assert older_part(path).exists()
    numbering.writer.close()
    with TraceFollower(path) as both, TraceFollower(path, with_older=False) as newer:
        assert numbers(both) == list(range(15))
        only = numbers(newer)
        assert 0 < len(only) < 15
        assert only == list(range(15 - len(only), 15))


def test_a_follower_sees_all_as_long_as_no_file_is_gone_that_it_has_not_read(path: Path) -> None:
    numbering = Numbering(path)
    follower = TraceFollower(path)
    found: list[int] = []
    for count in (1, 3, 0, 9, 9, 9, 2, 9):  # a file takes nine
        numbering.write(count)
        found += numbers(follower)
        assert found == list(range(numbering.next))
    numbering.writer.close()
    follower.close()


def test_what_was_replaced_before_it_was_read_is_said(path: Path) -> None:
    numbering = Numbering(path)
    follower = TraceFollower(path)
    numbering.write(2)
    found = numbers(follower)
    numbering.write(40)
    problems: list[str] = []
    found += numbers(follower, problems)
    assert problems == [f"'{path}' was replaced faster than it was read: records are missing here"]
    missing = sorted(set(range(numbering.next)) - set(found))
    assert missing == list(range(missing[0], missing[-1] + 1))
    assert found == sorted(set(found))
    numbering.write(5)
    assert numbers(follower) == list(range(numbering.next - 5, numbering.next))
    numbering.writer.close()
    follower.close()


@given(st.lists(st.tuples(st.sampled_from(["write", "read", "some", "restart"]), st.integers(1, 9)), max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whenever_readers_look_they_see_each_record_once(path: Path, steps: list[tuple[str, int]]) -> None:
    for each in (path, older_part(path)):
        each.unlink(missing_ok=True)
    numbering = Numbering(path)
    follower, found = TraceFollower(path), list[int]()
    unread = 0
    for action, count in steps:
        match action:
            case "write" if unread + count <= 9:
                numbering.write(count)
                unread += count
            case "read":
                found += numbers(follower)
                unread = 0
            case "some":  # stop in the middle
                for block in follower.poll():
                    assert isinstance(block, RecordBlock)
                    found += [int.from_bytes(each.record[:4], "little") for each in block]
                    break
            case "restart":
                numbering.writer.close()
                following = Numbering(path)
                following.next, numbering = numbering.next, following
    found += numbers(follower)
    numbering.writer.close()
    follower.close()
    assert found == list(range(numbering.next))


def test_several_readers_follow_a_writer_that_does_not_wait_for_them(path: Path) -> None:
    count = 3_000
    writing = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from dprobes.trace.trace_writer import TraceFileWriter\n"
        "path, count = Path(sys.argv[1]), int(sys.argv[2])\n"
        "writer = TraceFileWriter(path, 200_000)\n"
        "program = writer.add_program('app', 1, {})\n"
        "print(flush=True)\n"
        "sys.stdin.readline()\n"
        "for number in range(count):\n"
        "    writer.write(program, [(0, number.to_bytes(4, 'little') + bytes(396))])\n"
        "    if number % 100 == 0: time.sleep(0.01)\n"
        "writer.close()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", writing, path, str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        seen_by: list[list[int]] = [[] for _ in range(3)]
        problems: list[str] = []

        def follow(result: list[int]) -> None:
            follower = TraceFollower(path)
            while not result or result[-1] != count - 1:
                result += numbers(follower, problems)
            follower.close()

        threads = [threading.Thread(target=follow, args=(result,)) for result in seen_by]
        for thread in threads:
            thread.start()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(60) == 0
        for thread in threads:
            thread.join(60)
    for result in seen_by:
        assert result == sorted(set(result))
        if not problems:  # the machine was not too busy for them
            assert result == list(range(count))


def test_an_older_part_that_cannot_be_read_is_said_and_left_out(path: Path) -> None:
    older_part(path).write_bytes(header() + program() + records(1, (0, (1).to_bytes(4, "little"))) + b"\0" * 12)
    path.write_bytes(header(part=1) + program() + records(1, (0, (2).to_bytes(4, "little"))))
    at = older_part(path).stat().st_size - 12
    problems: list[str] = []
    with TraceFollower(path) as follower:
        assert numbers(follower, problems) == [1, 2]
    assert problems == [f"'{older_part(path)}' is damaged (at byte {at}); the rest of it is skipped"]
    # The file itself must be sound.
    path.rename(older_part(older_part(path)))
    older_part(path).rename(path)
    with TraceFollower(path) as follower, pytest.raises(FormatError, match="is damaged"):
        numbers(follower)


def test_lost_records_are_followed_too(path: Path) -> None:
    writer = TraceFileWriter(path)
    number = writer.add_program("app", 1, {})
    follower = TraceFollower(path)
    assert list(follower.poll()) == []
    writer.lose(number, 3)
    writer.write(number, [])
    (found,) = follower.poll()
    assert isinstance(found, LostRecords)
    assert found.count == 3
    writer.close()
    follower.close()
