"""``insert -c``: the program is about the command, from its first instruction on, and not about what starts it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from integration.support import await_true

if TYPE_CHECKING:
    from integration.manager.sandbox import Sandbox
    from integration.support import Builder

MALLOC = """name = "libc.so.6"
offset = malloc
maxhits = 5
push r, arg0
log 1
exit
"""


def records(sandbox: Sandbox) -> list[dict[str, Any]]:
    return [json.loads(line) for line in sandbox("dprobes log --format json").splitlines()]


@pytest.mark.parametrize("way", ["insert {}", "build {} -o m.ppdf; dprobes apply m.ppdf"])
def test_only_the_command_is_probed(sandbox: Sandbox, engine: str, way: str) -> None:
    sandbox.write("m.rpn", MALLOC)
    line = f"dprobes {way.format('m.rpn')} --engine {engine} --log ALL"
    said = sandbox(f'{line} -c "ls m.rpn"')
    assert said.splitlines()[-2].startswith("inserted 'libc.so.6': ")
    assert said.splitlines()[-1] == "m.rpn"
    await_true(lambda: len(records(sandbox)) == 5, "five records")
    assert {record["name"] for record in records(sandbox)} == {"ls"}
    # It is the first five calls of a run that are seen.
    sizes = [record["data"] for record in records(sandbox)]
    run = sandbox(f'dprobes run m.rpn --engine {engine} --format json -c "ls m.rpn" 2>/dev/null')
    assert sizes == [json.loads(line)["data"] for line in run.splitlines() if line.startswith("{")]


def test_what_query_counts_is_in_the_log(sandbox: Sandbox, engine: str) -> None:
    sandbox.write("m.rpn", MALLOC)
    for turn in range(3):
        sandbox(f'dprobes insert m.rpn --engine {engine} --as svc{turn} -c "ls m.rpn"')
        (probe,) = sandbox.probes(f"svc{turn}")
        assert len(records(sandbox)) == 5 * turn + probe["counts"]["records"]
        assert probe["counts"]["records"] < 5 or probe["state"] == "DISABLED"


def test_what_the_command_starts_is_probed_as_well_unless_that_is_not_wanted(
    sandbox: Sandbox, build: Builder, engine: str
) -> None:
    program = build("family.c")
    sandbox.write("f.rpn", f'name = "{program}"\noffset = tick\nexit\n')
    for options, hits in ("", 2), ("--no-follow", 1):
        sandbox(f'dprobes insert f.rpn --engine {engine} {options} --as svc -c "{program} fork 2"')
        await_true(lambda: sandbox.json("dprobes query --name svc --json")["programs"][0]["ended"], "the end")
        assert sandbox.counts("svc") == {0: hits}
        sandbox("dprobes remove --name svc")


def test_a_module_is_what_its_name_means_to_the_command(sandbox: Sandbox, build: Builder, engine: str) -> None:
    # The file has the name of no other one, and lies in no directory that is searched.
    program = build("family.c", name="a-name-of-its-own")
    sandbox.write("f.rpn", 'name = "a-name-of-its-own"\noffset = tick\nexit\n')
    sandbox(f'dprobes insert f.rpn --engine {engine} --as svc -c "{program} fork 0"')
    await_true(lambda: sandbox.json("dprobes query --name svc --json")["programs"][0]["ended"], "the end")
    assert sandbox.counts("svc") == {0: 1}


def test_a_command_that_cannot_be_started_leaves_nothing(sandbox: Sandbox, engine: str) -> None:
    sandbox.write("m.rpn", MALLOC)
    assert sandbox.refused(f"dprobes insert m.rpn --engine {engine} -c nosuchcommand") == (
        "dprobes: error: command 'nosuchcommand' is not found\nhint: write its path, or add its directory to PATH\n"
    )
    assert sandbox.manager is None
    broken = sandbox.write("broken", "\x7fELF")
    broken.chmod(0o755)
    said = sandbox.refused(f"dprobes insert m.rpn --engine {engine} --as svc -c ./broken")
    assert said.endswith("dprobes: error: './broken' cannot be started: exec format error\n")
    await_true(lambda: sandbox.json("dprobes query --name svc --json")["programs"][0]["ended"], "the end")
    assert sandbox.counts("svc") == {0: 0} or engine == "ptrace"


def test_a_text_is_inserted_as_a_file_is(sandbox: Sandbox, engine: str) -> None:
    text = 'libc.so.6:malloc(size) { printf("%d bytes", size) }'
    said = sandbox(f"dprobes insert --engine {engine} -e '{text}' -- ls -d /")
    assert said.splitlines()[-1] == "/"
    await_true(lambda: sandbox.json("dprobes query --json")["programs"][0]["ended"], "the end")
    found = records(sandbox)
    assert found
    shown = sandbox("dprobes log").splitlines()
    assert len(shown) == len(found)
    assert all(re.search(r"\b[0-9]+ bytes$", line) for line in shown)
