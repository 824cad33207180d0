"""Names that are made to harm whoever reads them, of files, symbols, sections and processes, in all that is printed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.cli.command_group import VERBS
from integration.manager.sandbox import Sandbox
from integration.support import await_line, await_true, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.support import Builder

HARM = b"\x1b[31m\nFORGED\r\x9b\x07\xc2\x9b\xe2\x80\xae\xff"
"""A colour, a line of its own, C1 controls as a byte and in UTF-8, a bell, text turned around, a byte of no UTF-8."""

PROGRAM = """name = "victim"
major = 7
vars = 1
offset = "evil*"
minor = 1
inc lv, 0
push r, rsp
log 1
exit

offset = main
opcode = 0x05
minor = 2
exit
"""


TICKS = """name = "victim"
major = 8
vars = 1
offset = tick
minor = 1
inc lv, 0
exit

offset = main
opcode = 0x05
exit
"""


class Hostile:
    """A program with such names, and a probe program for it, in a directory with such a name."""

    def __init__(self, build: Builder, directory: Path) -> None:
        self.directory = directory / os.fsdecode(HARM)
        self.directory.mkdir()
        self.victim = self.directory / "victim"
        image = build("hostile.c").read_bytes()
        for name in (b"evil_function_name_that_is_overwritten", b"evil_section_name_that_is_overwritten"):
            assert name in image
            image = image.replace(name, (b"evil" + HARM).ljust(len(name), b"_"))
        self.victim.write_bytes(image)
        self.victim.chmod(0o755)
        self.program = self.directory / "p.rpn"
        self.program.write_text(PROGRAM)
        # Compiled programs hold no such names: for these there is one that names none, and a clean place.
        self.copy = directory / "victim"
        self.copy.write_bytes(image)
        self.ticks = directory / "ticks.rpn"
        self.ticks.write_text(TICKS)


@pytest.fixture
def hostile(build: Builder, tmp_path: Path) -> Hostile:
    return Hostile(build, tmp_path)


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path)
    yield made
    made.close()


class Checked:
    """Run lines, and look at all that they print; ``said`` is that."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.verbs: set[str] = set()
        self.said = ""

    def __call__(self, line: str, *, fails: bool | None = False) -> str:
        self.verbs.add(line.split()[1])
        done = self._sandbox.shell(line, errors="surrogateescape")
        if fails is not None:
            assert (done.returncode != 0) == fails, f"{line}\n{done.stdout}{done.stderr}"
        for text in (done.stdout, done.stderr):
            bad = {c for c in text if not c.isprintable()} - {"\n"}
            assert not bad, f"{line} prints {bad}: {text!r}"
            forged = [each for each in text.split("\n") if re.match(r"\W*FORGED", each)]
            assert not forged, f"{line} prints {forged}: {text!r}"
        self.said += done.stdout + done.stderr
        return done.stdout + done.stderr


def test_no_verb_prints_what_disturbs_a_line_or_a_terminal(hostile: Hostile, sandbox: Sandbox, tmp_path: Path) -> None:
    checked = Checked(sandbox)
    victim, program = shlex.quote(str(hostile.victim)), shlex.quote(str(hostile.program))
    missing = shlex.quote(str(hostile.directory / os.fsdecode(b"missing" + HARM)))
    ticks, compiled = shlex.quote(str(hostile.ticks)), shlex.quote(str(hostile.directory / "p.ppdf"))
    trace = shlex.quote(str(hostile.directory / "t.dpt"))
    command = f"-c {shlex.quote(f'{victim} 3')}"
    harm = shlex.quote(os.fsdecode(HARM))

    # What is not there, is no verb, and no option.
    for verb in ("run", "check", "show", "build", "insert", "apply", "log", "format", "locate", "convert", "lsp"):
        checked(f"dprobes {verb} {missing}", fails=True)
    checked(f"dprobes {verb} {missing} --{harm}", fails=True)
    checked(f"dprobes {harm}", fails=True)
    checked.verbs.discard(harm)
    checked.verbs -= {line for line in checked.verbs if line not in VERBS}
    checked(f"dprobes sql {missing} 'select 1'", fails=True)
    checked(f"dprobes check {program} --templates {missing}", fails=None)
    checked(f"dprobes check -D {harm} {program}", fails=None)
    checked(f"dprobes run {program} --log-target {harm} {command}", fails=None)
    checked(f"dprobes run {program} -- {missing}", fails=True)

    # Running: notes, warnings, the summary, and records in each format.
    hits = [checked(f"dprobes run {program} --engine ptrace --log ALL --format {name} {command}")
            for name in ("text", "dump", "hex", "json")]  # fmt: skip
    assert all("MISMATCH" in text for text in hits)
    fields = "name,module,symbol,function"
    assert "a b\\x1b[7m\\nFORGED\\x9b" in checked(f"dprobes run {program} --engine ptrace --count {fields} {command}")
    checked(f"dprobes run {program} --engine ptrace --hist word0 {command}")
    checked(f"dprobes run {program} --engine ptrace -o {trace} {command}")
    for name in ("text", "dump", "hex", "json"):
        checked(f"dprobes log {trace} --format {name}")
        checked(f"dprobes format {trace} --format {name}")
    checked(f"dprobes log {trace} --count {fields}")
    checked(f"dprobes log {trace} --count {harm}", fails=True)
    checked(f"dprobes log {trace} --filter {harm}", fails=True)
    checked(f"dprobes sql {trace} 'select * from records'")
    checked(f"dprobes sql --json {trace} 'select * from records'")
    checked(f"dprobes sql {trace} {harm}", fails=True)
    checked(f"dprobes sql --list {trace}")

    with running(hostile.victim, "0", "stays", stdin=subprocess.PIPE) as process:
        assert await_line(process) == "ready\n"
        pid = process.pid
        checked(f"dprobes check {program}", fails=None)
        assert "evil\\x1b[31m\\nFORGED" in checked(f"dprobes show {program} -p {pid}")
        checked(f"dprobes show --bpf {program} -p {pid}", fails=None)
        assert "\\nFORGED" in checked(f"dprobes locate {victim}:main")
        checked(f"dprobes locate -p {pid} {harm}", fails=True)
        assert "a PPDF holds names and lines of text only" in checked(f"dprobes insert {program} -p {pid}", fails=True)
        checked(f"dprobes build {ticks} --for {hostile.copy} -o {compiled}")
        checked(f"dprobes show {compiled}")

        checked(f"dprobes patch {missing}:{harm} -p {pid} --allow-write", fails=True)
        checked(f"dprobes patch {victim}:main -p {pid} --allow-write", fails=True)
        checked(f"dprobes patch --list -p {pid}", fails=None)
        checked(f"dprobes patch --remove -p {pid} --allow-write {harm}", fails=True)

        # The manager's answers.
        checked(f"dprobes insert {ticks} -p {pid} --engine ptrace --as {harm}", fails=True)
        assert "MISMATCH" in checked(f"dprobes apply {compiled} -p {pid} --engine ptrace --log ALL --as one")
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        await_true(lambda: sandbox.counts("one")[1] > 0, "hits")
        for line in (
            "query", "query -x", "query --json", "getvars", "getvars --json", f"query --name {harm}",
            f"log-target add {missing}/{harm}", f"log-target add file:{missing}", "log-target list",
            "log-target list --json", "log-target kinds", f"log-target remove file:{missing}", "log",
            "log --format json", f"log --name {harm}", f"remove --name {harm}", f"remove {harm}", "remove --name one",
            "remove --all", "stop",
        ):  # fmt: skip
            checked(f"dprobes {line}", fails=None)
    checked(f"dprobes list {victim}")
    checked(f"dprobes list {victim} {harm}", fails=True)
    checked(f"dprobes list {missing}", fails=True)
    checked("dprobes doctor", fails=None)
    checked("dprobes completion bash")
    checked(f"dprobes examples {harm}", fails=True)
    checked(f"dprobes systemd install --directory {missing}/{harm}", fails=None)
    checked(f"dprobes sets {harm}", fails=True)
    checked(f"dprobes sets check {harm}", fails=True)
    checked(f"dprobes profile {victim}:{harm} {command}", fails=None)
    checked(f"dprobes profile {victim}:main {command}", fails=None)
    checked(f"dprobes profile {missing} {command}", fails=True)
    checked(f"dprobes storage {victim}:{harm} {command}", fails=True)
    assert "evil\\x1b[31m\\nFORGED" in checked(f"dprobes storage {victim}:calls {command}")
    checked(f"dprobes storage {missing}:{harm} {command}", fails=True)
    assert checked.verbs == set(VERBS)
    assert "FORGED" in checked.said  # the names were there
