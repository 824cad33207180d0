"""One definition, several probepoints: the copies of a module, each with its own counts and its own end."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Result, Runner

_ROW = re.compile(r"^(\d+,\d+) +(\S+) in (\S+) +(\d+) +(\d+) +\d+ +(\d+) +\d+$", re.MULTILINE)

TICK = "name = hotloop\noffset = tick\nminor = 3\npasscount = 2\nmaxhits = 10\nexit\n"


def rows(result: Result) -> dict[str, tuple[str, int, int, int]]:
    """Return probe, hits, records and hits passed over of each line of the summary that names a file, by file."""
    found = _ROW.findall(result.stderr)
    return {
        path: (f"{probe} {where}", int(hits), int(records), int(passed))
        for probe, where, path, hits, records, passed in found
    }


def test_copies_for_two_processors_are_counted_and_disabled_apart(build: Builder, run: Runner) -> None:
    programs = [build("hotloop.c"), build("hotloop.c", i386=True)]
    # passcount and maxhits are of each copy: neither uses up the other's.
    result = run.command(TICK, "/bin/sh", "-c", f"{programs[0]} 40; {programs[1]} 7")
    assert rows(result) == {
        str(programs[0]): ("0,3 tick", 12, 10, 2),
        str(programs[1]): ("0,3 tick", 7, 5, 2),
    }
    assert len(result.records) == 15


def test_two_files_of_one_name_are_two_probepoints(build: Builder, run: Runner, tmp_path: Path) -> None:
    program = build("hotloop.c")
    copy = tmp_path / "hotloop"
    shutil.copy(program, copy)
    result = run.command("name = hotloop\noffset = tick\nexit\n", "/bin/sh", "-c", f"{program} 3; {copy} 4; {copy} 1")
    assert rows(result) == {str(program): ("0,0 tick", 3, 3, 0), str(copy): ("0,0 tick", 5, 5, 0)}
    assert {record["symbol"] for record in result.records} == {"tick"}


def test_a_file_that_was_written_anew_is_another_one(build: Builder, run: Runner, tmp_path: Path) -> None:
    copy = tmp_path / "hotloop"
    first, second = build("hotloop.c"), build("hotloop.c", "-O2")
    commands = f"cp {first} {copy}; {copy} 3; cp {second} {copy}.new; mv {copy}.new {copy}; {copy} 4"
    result = run("name = hotloop\noffset = tick\nexit\n", ["--", "/bin/sh", "-c", commands])
    assert [(int(hits), path) for _, _, path, hits, *_ in _ROW.findall(result.stderr)] == []
    assert re.findall(r"^0,0 +tick +(\d+)", result.stderr, re.MULTILINE) == ["3", "4"]


def test_a_definition_that_found_no_place_is_listed(run: Runner) -> None:
    result = run(
        "name = nosuchmodule\noffset = 0x10\nminor = 4\nexit\noffset = 0x20\nminor = 5\nexit\n", ["--", "true"]
    )
    assert re.findall(r"^0,\d .*$", result.stderr, re.MULTILINE) == [
        "0,4    not resolved     0        0     0            0         0",
        "0,5    not resolved     0        0     0            0         0",
    ]
    assert result.status == 1
