"""One definition, several probepoints: the copies of a module, each with its own counts and its own end."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

from integration.support import (
    DPROBES,
    await_breakpoint,
    await_line,
    code_is_original,
    environment,
    read_result,
    running,
)

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Result, Runner

_ROW = re.compile(r"^(\d+,\d+) +(\S+) in (\S+) +(\d+) +(\d+) +\d+ +(\d+) +\S.*$", re.MULTILINE)

TICK = "name = hotloop\noffset = tick\nminor = 3\npasscount = 2\nmaxhits = 10\nexit\n"


def rows(result: Result) -> dict[str, tuple[str, int, int, int]]:
    """Return probe, hits, records and hits skipped of each line of the summary that names a file, by file."""
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
        "0,4    not resolved     0        0     0       0  -",
        "0,5    not resolved     0        0     0       0  -",
    ]
    assert result.status == 1


MANY = "name = many\noffset = many_*\nminor = 1\npush r, arg0\nlog 1\nexit\n"


def test_ten_thousand_functions_are_each_a_probepoint(build: Builder, run: Runner) -> None:
    program = build("many.c")
    plain = subprocess.run([str(program), "1"], check=True, capture_output=True, text=True).stdout
    result = run.command(MANY, program, 1)
    assert result.stdout == plain
    # The program calls them in order, each once.
    assert [record["function"] for record in result.records] == [f"many_{n}" for n in range(10_000)]
    assert len({record["ip"] for record in result.records}) == 10_000
    found = re.findall(r"^0,1 +many_(\d+) +1 +1 +0 +0 +\S.*$", result.stderr, re.MULTILINE)
    assert [int(n) for n in found] == list(range(10_000))


def test_ten_thousand_probepoints_come_and_go_with_a_running_process(build: Builder, run: Runner) -> None:
    program = build("many.c")
    with running(program, 1, "wait", stdin=subprocess.PIPE) as target:
        await_line(target)
        client, output = run.start(MANY, ["-p", str(target.pid)])
        await_breakpoint(target.pid, program, "many_0")
        await_breakpoint(target.pid, program, "many_9999")
        client.send_signal(signal.SIGINT)
        result = read_result(client, output)
        assert result.status == 0
        assert "and 10000 probepoints that were not hit" in result.stderr
        assert code_is_original(target.pid, program)
        assert target.communicate("")[0] == "49995000\n"


def test_max_hits_disables_each_of_many_apart(build: Builder, run: Runner) -> None:
    source = "name = many\noffset = many_1*\nmaxhits = 1\npasscount = 1\nexit\n"
    program = build("many.c", i386=True)
    result = run.command(source, program, 3)
    assert result.stdout == "150015000\n"
    assert len(result.records) == 1111
    assert set(re.findall(r"^0,0 +many_1\d* +(\d+ +\d+ +\d+ +\d+)", result.stderr, re.MULTILINE)) == {
        "2        1     0       1"
    }


def test_records_name_the_function_and_the_summary_what_was_left_out(build: Builder, tmp_path: Path) -> None:
    source = "name = threads\noffset = *i*\nminor = 1\nexit\noffset = tick\nminor = 2\nexit\n"
    program = tmp_path / "threads.rpn"
    program.write_text(source)
    process = subprocess.run(
        [*DPROBES, "run", "--engine", "ptrace", "--format", "dprobes", str(program), "-c", f"{build('threads.c')} 1 3"],
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
    )
    assert re.search(r"^DProbes\(0,1\) .*rip=[0-9a-f]{16} function=main$", process.stdout, re.MULTILINE)
    assert "DProbes(0,2)" in process.stdout
    assert not re.search(r"^DProbes\(0,2\).*(rip|function)=", process.stdout, re.MULTILINE)
    assert "\n0,1  left out 1, because it is the place of another probe definition: tick\n" in process.stderr


def test_each_of_two_files_in_one_process_has_its_own_symbols(build: Builder, run: Runner, tmp_path: Path) -> None:
    library = build("plugin.c", "-shared", "-fPIC", name="libplugin.so")
    copy = tmp_path / "libplugin.so"
    data = library.read_bytes()
    assert data.count((4711).to_bytes(4, "little")) == 1
    copy.write_bytes(data.replace((4711).to_bytes(4, "little"), (4712).to_bytes(4, "little")))
    script = f"import ctypes\nfor p in 2 * [{str(library)!r}, {str(copy)!r}]: ctypes.CDLL(p).plugin_call(1)"
    result = run.command(
        "name = \"libplugin.so\"\noffset = plugin_call\npush plugin_value\npush mem, u32\nlog 1\nexit\n",
        "/usr/bin/python3", "-c", script,
    )  # fmt: skip
    assert result.words() == [[4711], [4712], [4711], [4712]]


def test_what_is_doubtful_about_a_file_that_is_found_later_is_said(build: Builder, run: Runner) -> None:
    # The name is found nowhere before the shell starts the program.
    program = build("hotloop.c", name="foundlater")
    source = "name = foundlater\noffset = tick\nopcode = 0x90\nexit\noffset = main\nminor = 1\nexit\n"
    result = run.command(source, "/bin/sh", "-c", f"{program} 3; {program} 3")
    assert f"dprobes: warning: {program}: this file does not match the program\n" in result.stderr
    warning = r"^\S+1\.rpn:3:1: warning: MISMATCH: opcode 0x[0-9a-f]+ \(.*\) is there, not 0x90; not inserted$"
    assert len(re.findall(warning, result.stderr, re.MULTILINE)) == 1
    assert result.counts[1].hits == 2
