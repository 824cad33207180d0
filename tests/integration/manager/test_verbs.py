"""A scenario for each verb, through the real command in a real shell."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.manager.sandbox import rows
from integration.support import TIMEOUT, await_true, code_is_original, is_traced

if TYPE_CHECKING:
    from integration.manager.sandbox import Sandbox, Service

PROGRAM = """name = "{library}"
major = 5
vars = 2
gvars = 3

offset = write_file
minor = 1
push r, arg0
log 1
inc lv, 0
inc gv, 1
exit

offset = allocate_memory
minor = 2
passcount = 2
maxhits = 3
inc lv, 1
exit
"""


@pytest.fixture
def source(sandbox: Sandbox, target: Service) -> Path:
    return sandbox.write("service.rpn", PROGRAM.format(library=target.library))


@pytest.fixture
def options(engine: str, target: Service) -> str:
    """Options for the same processes with each engine."""
    return f"--engine {engine} -p {target.pid}"


def test_insert_query_remove(sandbox: Sandbox, target: Service, source: Path, options: str) -> None:
    said = sandbox(f"dprobes insert {source} {options} --as svc")
    assert said == "inserted 'svc': 2 of 2 probepoints active\n"
    target.call("write_file", 10)
    target.call("allocate_memory", 7)
    await_true(lambda: sandbox.counts("svc")[1] == 10, "ten hits")
    title, header, first, second = rows(sandbox("dprobes query"))
    engine = options.split()[1]
    began = r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    expected = (
        rf"svc \(module {re.escape(str(target.library))}\): 2 probepoints, engine {engine}, "
        rf"process {target.pid} and what it starts, {began}"
    )
    assert re.fullmatch(expected, title[0])
    assert header == ["probe", "place", "state", "hits", "records", "lost", "passed"]
    assert first == ["5,1", "write_file", "ACTIVE", "10", "10", "0", "0"]
    assert second == ["5,2", "allocate_memory", "DISABLED", "5", "3", "0", "2"]
    removed = rows(sandbox("dprobes remove --name svc"))
    assert removed[0] == ["removed svc"]
    assert removed[2][3:5] == ["10", "10"]
    assert code_is_original(target.pid, target.library)
    assert not is_traced(target.pid)
    assert sandbox("dprobes query") == "no program is inserted\n"
    assert sandbox.refused("dprobes query --name svc") == (
        "dprobes: error: no program 'svc' is inserted\nhint: inserted are: none\n"
    )
    target.end()


def test_query_extended_shows_everything(sandbox: Sandbox, target: Service, source: Path, options: str) -> None:
    sandbox(f"dprobes insert {source} {options} --as svc")
    target.call("write_file", 4)
    await_true(lambda: sandbox.counts("svc")[1] == 4, "four hits")
    text = sandbox("dprobes query --extended")
    assert "modtype = user, major = 5, id = 0, jmpmax = 256, logmax = 1024" in text
    assert "  locals: 4, 0\n" in text
    assert re.search(r"^5,1  write_file in \S+libservice\.so\.1  ACTIVE$", text, re.MULTILINE)
    assert re.search(r"^  offset 0x[0-9a-f]+(, placed at 0x[0-9a-f]+)?, opcode 0x[0-9a-f]{2}: ", text, re.MULTILINE)
    assert "  passcount = 2, maxhits = 3\n" in text
    assert re.search(r"^  0000 +0  push r, rdi$", text, re.MULTILINE) or "push r, arg0" in text
    assert text.count("inc lv, 0") == 1
    (program,) = sandbox.json("dprobes query --json")["programs"]
    assert program["locals"] == [4, 0]
    assert program["scope"] == {"pid": target.pid, "follow": True}


def test_query_extended_shows_the_handlers_that_were_selected(sandbox: Sandbox, target: Service) -> None:
    text = f'name = "{target.library}"\ngroupdef = one two\n'
    text += "offset = write_file\nminor = 1\ngroup = one\npush 1\nlog 1\nexit\n"
    text += "offset = release_memory\nminor = 2\ngroup = two\nbegin: push 2\njz begin\nexit\n"
    source = sandbox.write("groups.rpn", text)
    sandbox(f"dprobes insert {source} --engine ptrace -p {target.pid} --group two --as svc")
    lines = sandbox("dprobes query --extended").splitlines()
    assert not any(line.endswith("log 1") for line in lines)
    assert [line.split()[0] for line in lines[-4:]] == ["begin:", "0000", "0009", "0012"]
    assert lines[-2].endswith("jz begin  // 0000")


def test_getvars(sandbox: Sandbox, target: Service, source: Path, options: str) -> None:
    sandbox(f"dprobes insert {source} {options} --as svc")
    target.call("write_file", 6)
    target.call("allocate_memory", 3)

    def values() -> list[int]:
        found: list[int] = sandbox.json("dprobes getvars --name svc --json")["programs"][0]["locals"]
        return found

    await_true(lambda: values() == [6, 1], "the local variables")
    assert rows(sandbox("dprobes getvars --all")) == [
        ["global variables"],
        ["variable", "value", "hex"],
        ["gv,0", "0", "0x0"],
        ["gv,1", "6", "0x6"],
        ["gv,2", "0", "0x0"],
        ["local variables of svc"],
        ["variable", "value", "hex"],
        ["lv,0", "6", "0x6"],
        ["lv,1", "1", "0x1"],
    ]
    assert rows(sandbox("dprobes getvars --global --index 1-1")) == [
        ["global variables"],
        ["variable", "value", "hex"],
        ["gv,1", "6", "0x6"],
    ]
    assert sandbox("dprobes getvars --local --reset --name svc") == ""
    assert values() == [0, 0]
    assert sandbox.json("dprobes getvars --json")["globals"] == {"count": 3, "values": [0, 6, 0]}
    # Global variables outlive programs.
    sandbox("dprobes remove --all")
    assert sandbox.json("dprobes getvars --json")["globals"]["values"][:2] == [0, 6]
    sandbox("dprobes getvars --global --reset")
    assert sandbox("dprobes getvars") == "no global variables\n"


def test_variables_are_reset_by_their_indices(sandbox: Sandbox, target: Service, engine: str) -> None:
    increments = "".join(f"inc lv, {n}\ninc gv, {n}\ninc cv, {n}\n" for n in range(3))
    text = f'name = "{target.library}"\nvars = 3\ngvars = 3\ncvars = 3\noffset = write_file\n{increments}exit\n'
    source = sandbox.write("variables.rpn", text)
    sandbox(f"dprobes insert {source} --engine {engine} -p {target.pid} --as svc")
    target.call("write_file", 5)

    def values() -> tuple[list[int], list[int], list[int]]:
        found = sandbox.json("dprobes getvars --json")
        program = found["programs"][0]
        return found["globals"]["values"], program["locals"], [sum(each) for each in zip(*program["cpu"], strict=True)]

    five = [5, 5, 5]
    await_true(lambda: values() == (five, five, five), "five hits")
    sandbox("dprobes getvars --reset --local --index 1")
    assert values() == (five, [5, 0, 5], [5, 0, 5])
    target.call("write_file", 2)
    await_true(lambda: values() == ([7, 7, 7], [7, 2, 7], [7, 2, 7]), "two more hits")
    sandbox("dprobes getvars --reset --all --index 1-2")
    assert values() == ([7, 0, 0], [7, 0, 0], [7, 0, 0])
    sandbox("dprobes getvars --reset --global --index 0")
    assert values() == ([0, 0, 0], [7, 0, 0], [7, 0, 0])
    sandbox("dprobes getvars --reset --index 3")
    assert values() == ([0, 0, 0], [7, 0, 0], [7, 0, 0])
    sandbox("dprobes getvars --reset --name svc")
    assert values() == ([0, 0, 0], [0, 0, 0], [0, 0, 0])


def test_one_probepoint_is_removed_by_its_codes(sandbox: Sandbox, target: Service, source: Path, options: str) -> None:
    sandbox(f"dprobes insert {source} {options} --as svc")
    assert sandbox("dprobes remove 5,1") == "removed 1 probepoint 5,1\n"
    await_true(lambda: sandbox.probes("svc")[0]["state"] == "REMOVED", "the end of the probepoint")
    target.call("write_file", 5)
    target.call("allocate_memory", 1)
    await_true(lambda: sandbox.counts("svc")[2] == 1, "a hit of the other one")
    assert sandbox.counts("svc")[1] == 0
    assert sandbox.refused("dprobes remove 5,9") == ("dprobes: error: no inserted program has a probepoint 5,9\n")


def test_log_prints_what_was_recorded(sandbox: Sandbox, target: Service, source: Path, options: str) -> None:
    sandbox(f"dprobes insert {source} {options} --as svc --log PID")
    target.call("write_file", 3)
    await_true(lambda: sandbox.counts("svc", "records")[1] == 3, "the records")
    sandbox("dprobes remove --name svc")
    printed = re.findall(
        rf"^(?:service)?\[{target.pid}\]  write_file  arg0=(.*)$", sandbox("dprobes log"), re.MULTILINE
    )
    assert printed == ["0", "1", "2"]
    lines = sandbox("dprobes log --format dprobes").splitlines()
    assert [line for line in lines if not line.startswith("DProbes(")] == [
        f"{n:02x} 00 00 00 00 00 00 00" for n in range(3)
    ]
    headers = [line for line in lines if line.startswith("DProbes(")]
    assert all(re.search(rf"^DProbes\(5,1\) cpu=\d+ (name=service )?pid={target.pid}$", line) for line in headers)
    assert sandbox("dprobes log --name other") == ""


def test_log_follows(sandbox: Sandbox, target: Service, source: Path, options: str) -> None:
    sandbox(f"dprobes insert {source} {options} --as svc")
    follower = sandbox.start("dprobes log -f --format json | head -n 4")
    target.call("write_file", 2)
    target.call("write_file", 2)
    text, _ = follower.communicate(timeout=TIMEOUT)
    assert [line.split('"minor": ')[1].split(",")[0] for line in text.splitlines()] == ["1"] * 4


def test_log_targets_come_and_go(sandbox: Sandbox, target: Service, source: Path, options: str) -> None:
    early, late = sandbox.directory / "early.txt", sandbox.directory / "late.txt"
    sandbox(f"dprobes insert {source} {options} --as svc --log-target ./early.txt -f")
    target.call("write_file", 2)
    sandbox("dprobes log-target add ./late.txt --name svc --format hex")
    target.call("write_file", 3)

    def written() -> dict[str, int]:
        targets = sandbox.json("dprobes log-target list --json")["targets"]
        return {Path(each["name"].removeprefix("file:")).name: each["written"] for each in targets}

    await_true(lambda: written() == {"early.txt": 5, "late.txt": 3}, "the records in both files")
    (_, row) = rows(sandbox("dprobes log-target remove ./late.txt"))
    assert row[1:6] == ["svc", "hex", "3", "0", "0"]
    target.call("write_file", 1)
    await_true(lambda: written() == {"early.txt": 6}, "another record")
    assert [text.read_text().count("DProbes(5,1)") for text in (early, late)] == [6, 3]
    assert sandbox.refused("dprobes log-target remove ./late.txt").startswith("dprobes: error: there is no log target ")
    assert sandbox.refused("dprobes log-target add nowhere") == (
        "dprobes: error: there is no log target 'nowhere'\nhint: 'dprobes log-target kinds' lists them\n"
    )
    sandbox("dprobes remove --all")
    assert sandbox("dprobes log-target list") == "no log targets besides the manager's trace file\n"


def test_stop_takes_everything_away_at_once(sandbox: Sandbox, target: Service, source: Path, options: str) -> None:
    sandbox(f"dprobes insert {source} {options} --as svc")
    pid = sandbox.manager
    assert sandbox("dprobes stop") == "stopped 1 program\n"
    assert code_is_original(target.pid, target.library)
    assert not is_traced(target.pid)
    assert sandbox("dprobes query") == "no program is inserted\n"
    assert sandbox.manager == pid
    assert sandbox("dprobes stop --manager") == "stopped 0 programs\n"
    await_true(lambda: sandbox.manager is None, "the end of the manager")
    assert sandbox.refused("dprobes stop") == (
        "dprobes: error: no probe manager runs, so nothing is inserted\nhint: 'dprobes insert FILE' starts one\n"
    )
    target.end()


IMPATIENT = """
import sys
from dprobes.cli.main import run
from dprobes.cli.verbs import manager_verbs
client = manager_verbs.client
manager_verbs.client = lambda patience: client(patience=1.0)
sys.exit(run(["stop"]))
"""
"""The verb ``stop``, which waits a second instead of ten for a manager that cannot answer."""


def test_stop_lets_a_manager_that_was_stopped_end(
    sandbox: Sandbox, target: Service, source: Path, options: str
) -> None:
    sandbox(f"dprobes insert {source} {options} --as svc")
    pid = sandbox.manager
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    done = sandbox.shell(f"{sys.executable} -c {shlex.quote(IMPATIENT)}")
    assert done.returncode == 0
    assert done.stderr == f"dprobes: warning: the probe manager does not answer: timed out; ended process {pid}\n"
    await_true(lambda: code_is_original(target.pid, target.library), "the original code")
    target.call("write_file", 2)
    assert sandbox(f"dprobes insert {source} {options} --as svc").startswith("inserted 'svc'")
    target.end()


def test_a_manager_that_is_stopped_is_not_waited_for(sandbox: Sandbox, target: Service, source: Path) -> None:
    sandbox(f"dprobes insert {source} --engine ptrace -p {target.pid} --as svc")
    pid = sandbox.manager
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        for line in (
            "query",
            "getvars",
            "log-target list",
            "remove --all",
            f"insert {source} -p {target.pid} --as b",
        ):
            assert sandbox.refused(f"dprobes {line}") == (
                f"dprobes: error: the probe manager, process {pid}, does not answer: it is stopped\n"
                f"hint: 'kill -CONT {pid}' continues it; 'dprobes stop' ends it\n"
            )
    finally:
        os.kill(pid, signal.SIGCONT)
    # Nothing of that is carried out later.
    assert [program["name"] for program in sandbox.json("dprobes query --json")["programs"]] == ["svc"]


@pytest.mark.parametrize("name", ["", "two\nlines", "a\x1b[2Jb", "x" * 256, "\udcff"])
def test_a_program_has_a_name_that_can_be_printed(sandbox: Sandbox, target: Service, source: Path, name: str) -> None:
    line = shlex.join(["dprobes", "insert", str(source), "-p", str(target.pid), "--as", name])
    said = sandbox.refused(line)
    shown = repr(name if len(name) < 50 else name[:40] + "...")
    assert said == (
        f"dprobes: error: a program cannot be named {shown}\n"
        "hint: a name is a string of 1 to 255 bytes without control characters\n"
    )
    assert sandbox("dprobes query") == "no program is inserted\n"


def test_what_is_gone_is_in_the_way_of_no_program_that_is_merged(
    sandbox: Sandbox, target: Service, source: Path, options: str
) -> None:
    sandbox(f"dprobes insert {source} {options} --as svc")
    sandbox("dprobes remove 5,1")
    target.call("allocate_memory", 6)  # as many as maxhits allows
    await_true(lambda: [p["state"] for p in sandbox.probes("svc")] == ["REMOVED", "DISABLED"], "the ends")
    said = sandbox(f"dprobes insert {source} {options} --as svc --merge")
    assert said == "inserted 'svc': 2 of 2 probepoints active\n"
    target.call("write_file", 2)
    programs = sandbox.json("dprobes query --json")["programs"]
    assert [[probe["counts"]["hits"] for probe in program["probes"]] for program in programs] == [[0, 5], [2, 0]]
    refusal = sandbox.refused(f"dprobes insert {source} {options} --as svc --merge", status=2)
    assert "error: the program that is inserted already has a probepoint at offset 0x" in refusal


def test_a_second_program_for_a_module_is_refused(sandbox: Sandbox, target: Service, source: Path, engine: str) -> None:
    sandbox(f"dprobes insert {source} --engine {engine} -p {target.pid}")
    assert sandbox.refused(f"dprobes insert {source} --engine {engine} -p {target.pid}") == (
        f"dprobes: error: a program for '{target.library}' is inserted already\n"
        "hint: --merge adds to it, --replace replaces it, --as NAME inserts another one\n"
    )
    refusal = sandbox.refused(f"dprobes insert {source} --engine {engine} -p {target.pid} --merge", status=2)
    assert "error: the program that is inserted already has a probepoint at offset 0x" in refusal
    assert f"{source}:6:" in refusal
    assert "note: it is here" in refusal
    other = sandbox.write(
        "other.rpn", f'name = "{target.library}"\nmajor = 6\noffset = release_memory\nminor = 3\npush 7\nlog 1\nexit\n'
    )
    sandbox(f"dprobes insert {other} --engine {engine} -p {target.pid} --merge")
    sandbox(f"dprobes insert {other} --engine {engine} -p {target.pid} --as beside")
    target.call("release_memory", 3)
    names = [program["name"] for program in sandbox.json("dprobes query --json")["programs"]]
    assert names == [str(target.library), str(target.library), "beside"]
    await_true(lambda: sandbox.counts("beside") == {3: 3}, "the hits")
    sandbox(f"dprobes remove --name {target.library}")
    assert [program["name"] for program in sandbox.json("dprobes query --json")["programs"]] == ["beside"]


def test_a_command_is_started_with_the_program_in_it(
    sandbox: Sandbox, target: Service, source: Path, options: str
) -> None:
    engine = " ".join(options.split()[:2])
    process = sandbox.start(
        f"dprobes insert {source} {engine} --as svc -- {target.program} > inserted", stdin=subprocess.PIPE
    )
    text, _ = process.communicate("write_file 9\nallocate_memory 1\n", timeout=TIMEOUT)
    assert "inserted 'svc': " in (sandbox.directory / "inserted").read_text()
    await_true(lambda: sandbox.counts("svc") == {1: 9, 2: 1}, "the hits of the command")
    await_true(lambda: sandbox.json("dprobes query --json")["programs"][0]["ended"], "the end of the program")
    assert text == ""


def test_tables_are_cleared_by_their_names(sandbox: Sandbox, target: Service, engine: str) -> None:
    text = f'name = "{target.library}"\ntable = hits, count\ntable = more, count\n'
    source = sandbox.write("tables.rpn", f"{text}offset = write_file\ntally hits\ntally more\nabort\n")
    sandbox(f"dprobes insert {source} --engine {engine} -p {target.pid} --as svc")

    def held() -> list[int]:
        found = sandbox.json("dprobes getvars --json --name svc")["programs"][0]["tables"]
        return [sum(row["value"] for row in found if row["table"] == name) for name in ("hits", "more")]

    target.call("write_file", 5)
    await_true(lambda: held() == [5, 5], "five hits")
    assert sandbox("dprobes getvars --clear hits") == ""
    assert held() == [0, 5]
    target.call("write_file", 2)
    await_true(lambda: held() == [2, 7], "two more hits")
    assert sandbox.refused("dprobes getvars --name svc --clear hits --clear his") == (
        "dprobes: error: no keyed table is called 'his'\nhint: there are: hits, more\n"
    )
    assert held() == [2, 7]
    sandbox("dprobes getvars --name svc --clear '*'")
    assert held() == [0, 0]
    assert "--clear applies to keyed tables" in sandbox.refused("dprobes getvars --clear hits --reset", 2)


def test_tables_are_in_the_trace_file_and_at_targets_when_a_program_is_removed(
    sandbox: Sandbox, target: Service, engine: str
) -> None:
    text = f'name = "{target.library}"\ntable = hits, count\ntable = places, count, address\n'
    source = sandbox.write("tables.rpn", f"{text}offset = write_file\ntally hits\npush r, rip\ntally places\nabort\n")
    path = sandbox.write("tables.json", "")
    sandbox(f"dprobes insert {source} --engine {engine} -p {target.pid} --as svc")
    sandbox(f"dprobes log-target add file:{path} --format json")
    target.call("write_file", 3)
    await_true(lambda: "@hits: 3" in sandbox("dprobes getvars --name svc"), "three hits")
    sandbox("dprobes remove --name svc")
    shown = sandbox("dprobes log --tables")
    assert "@hits: 3\n" in shown
    assert re.search(r"@places\[write_file \[[^]]+\]\]: 3\n", shown)
    await_true(lambda: '"hits"' in path.read_text(), "the tables at the target")
    assert '{"table": "hits", "kind": "count", "keys": [], "value": 3}' in path.read_text()
