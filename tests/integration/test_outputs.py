"""What ``dprobes run`` prints where: records, what the command prints, and what is refused before anything happens."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.manager.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.support import Builder

PROGRAM = """name = "hostile"
major = 3
offset = tick
minor = 1
push 7
log 1
exit
"""


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path)
    made.write("p.rpn", PROGRAM)
    (tmp_path / "templates").mkdir()
    made.write("templates/templates.lst", "3 t.fmt\n")
    made.write("templates/t.fmt", 'major = 3\nminor = 1\nfmt = "by %{name} seven=%d"\n')
    yield made
    made.close()


@pytest.mark.parametrize("engine", ["ptrace", "ebpf"])
def test_records_for_programs_are_apart_from_what_the_command_prints(
    build: Builder, sandbox: Sandbox, engine: str
) -> None:
    if engine == "ebpf":
        require_bpf()
        require_initial_namespace()
    line = f"printf x | dprobes run p.rpn --engine {engine}"
    command = f"-- {build('hostile.c')} 0 stays"
    done = sandbox.shell(f"{line} --format json {command}")
    assert [json.loads(each)["symbol"] for each in done.stdout.splitlines()] == ["tick"], done.stderr
    assert "ready\n" in done.stderr
    done = sandbox.shell(f"{line} --format csv {command}")
    (row,) = csv.DictReader(io.StringIO(done.stdout, newline=""))
    assert (row["program"], row["word_size"], row["function"]) == ("hostile", "8", "tick")
    assert "ready\n" in sandbox.shell(f"{line} --format json -o out.json {command}").stdout
    assert "ready\n" in sandbox.shell(f"{line} --format text {command}").stdout


def test_records_carry_what_templates_print(build: Builder, sandbox: Sandbox) -> None:
    line = f"printf x | dprobes run p.rpn --templates templates --engine ptrace -- {build('hostile.c')} 0 stays"
    assert "  by a b\\x1b[7m\\nFORGED\\x9b seven=7\n" in sandbox(line)
    headers = sandbox(line.replace("--engine", "--format dprobes --engine"))
    assert " name=a\\x20b\\x1b[7m\\nFORGED\\x9b\nby a b\\x1b[7m\\nFORGED\\x9b seven=7\n" in headers


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--count nam", "records have no field 'nam'\nhint: did you mean 'name'?\n"),
        ("--hist name", "'name' is not a number\nhint: count its values: --count name\n"),
        ("--hist function", "'function' is not a number\nhint: count its values: --count function\n"),
    ],
)
def test_fields_are_checked_before_anything_happens(
    build: Builder, sandbox: Sandbox, option: str, message: str
) -> None:
    done = sandbox.shell(f"dprobes run p.rpn --engine ptrace {option} -- {build('hostile.c')} 0 stays")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"dprobes: error: {message}")


def test_counted_fields_are_those_of_conditions(build: Builder, sandbox: Sandbox) -> None:
    fields = "program,function,word_size,stack_trace"
    command = f"-- {build('hostile.c')} 0 stays"
    counted = sandbox(f"printf x | dprobes run p.rpn --engine ptrace --count {fields} {command}")
    assert ["hostile", "tick", "8", "0", "1", "100.0%"] in [each.split() for each in counted.splitlines()]
    sandbox(f"printf x | dprobes run p.rpn --engine ptrace -o t.dpt {command}")
    condition = "program == 'hostile' and function == 'tick' and word_size == 8 and stack_trace == 0"
    assert sandbox(f'dprobes log t.dpt --total --filter "{condition}"') == "1\n"
