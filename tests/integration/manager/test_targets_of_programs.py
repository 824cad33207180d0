"""Log targets that come with a program: they get its records by its templates, and go with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.manager.sandbox import service
from integration.support import await_true

if TYPE_CHECKING:
    from integration.manager.sandbox import Sandbox, Service
    from integration.support import Builder

PROGRAM = 'name = "{library}"\nmajor = 5\noffset = write_file\nminor = 1\npush r, arg0\nlog 1\nexit\n'


@pytest.fixture
def source(sandbox: Sandbox, target: Service) -> Path:
    return sandbox.write("service.rpn", PROGRAM.format(library=target.library))


def targets(sandbox: Sandbox) -> dict[str, int]:
    """Return how many records each log target has taken."""
    found = sandbox.json("dprobes log-target list --json")["targets"]
    return {Path(each["name"].removeprefix("file:")).name: each["written"] for each in found}


def test_they_get_records_by_the_templates_that_came_with_the_program(
    sandbox: Sandbox, target: Service, source: Path
) -> None:
    (sandbox.directory / "templates").mkdir()
    sandbox.write("templates/templates.lst", "5 t.fmt\n")
    sandbox.write("templates/t.fmt", 'major = 5\nminor = 1\nfmt = "argument %qx"\n')
    insert = f"dprobes insert {source} --engine ptrace -p {target.pid} --as svc --log-target"
    sandbox(f"{insert} ./shown.txt --templates templates")
    target.call("write_file", 2)
    await_true(lambda: targets(sandbox) == {"shown.txt": 2}, "two records")
    sandbox("dprobes remove --all")
    sandbox(f"{insert} ./named.txt")
    target.call("write_file", 1)
    await_true(lambda: targets(sandbox) == {"named.txt": 1}, "a record")
    sandbox("dprobes remove --all")
    sandbox(f"{insert} ./chosen.txt --templates templates --log-format dump")
    target.call("write_file", 1)
    await_true(lambda: targets(sandbox) == {"chosen.txt": 1}, "a record")
    strings = {name: (sandbox.directory / f"{name}.txt").read_text() for name in ("shown", "named", "chosen")}
    assert strings["shown"].count("argument ") == 2
    assert re.search(rf"^\d\d:\d\d:\d\d\.\d{{6}}  service\[{target.pid}\]  write_file  arg0=0\n$", strings["named"])
    assert "0x00000000 : " in strings["chosen"]
    assert "argument" not in strings["chosen"]


def test_they_are_gone_when_everything_is_stopped(sandbox: Sandbox, target: Service, source: Path) -> None:
    insert = f"dprobes insert {source} --engine ptrace -p {target.pid} --as svc"
    sandbox(f"{insert} --log-target ./first.txt")
    sandbox("dprobes log-target add ./all.txt")
    target.call("write_file", 2)
    await_true(lambda: targets(sandbox) == {"first.txt": 2, "all.txt": 2}, "two records")
    sandbox("dprobes stop")
    assert targets(sandbox) == {"all.txt": 2}
    sandbox(insert)
    target.call("write_file", 3)
    await_true(lambda: targets(sandbox) == {"all.txt": 5}, "three more")
    assert (sandbox.directory / "first.txt").read_text().count("  write_file  ") == 2


def test_they_do_not_get_the_records_of_the_next_program_when_one_has_ended_by_itself(
    sandbox: Sandbox, target: Service, source: Path, build: Builder
) -> None:
    sandbox(f"dprobes insert {source} --engine ptrace -p {target.pid} --as svc --log-target ./first.txt")
    sandbox("dprobes log-target add ./chosen.txt --name svc")
    target.call("write_file", 2)
    await_true(lambda: targets(sandbox) == {"first.txt": 2, "chosen.txt": 2}, "two records")
    target.end()
    await_true(lambda: sandbox.json("dprobes query --json")["programs"][0]["ended"], "the end of the program")
    with service(build) as another:
        sandbox(f"dprobes insert {source} --engine ptrace -p {another.pid} --as svc --log-target ./second.txt")
        another.call("write_file", 3)
        await_true(lambda: targets(sandbox) == {"second.txt": 3, "chosen.txt": 5}, "three records")
        another.end()
    assert (sandbox.directory / "first.txt").read_text().count("  write_file  ") == 2


def test_a_program_that_cannot_be_merged_leaves_none(sandbox: Sandbox, target: Service, source: Path) -> None:
    insert = f"dprobes insert {source} --engine ptrace --as svc"
    sandbox(f"{insert} -p {target.pid} --log-target ./first.txt")
    sandbox.refused(f"{insert} -p 4194304 --merge --log-target ./second.txt")
    assert list(targets(sandbox)) == ["first.txt"]
