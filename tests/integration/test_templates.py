"""Templates from where a program is written to where its records are read, on real programs."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import dprobes
from dprobes.trace.trace_frames import FRAME_HEAD, json_frame
from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.manager.sandbox import Sandbox
from integration.support import DPROBES, TIMEOUT, environment

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder

PROGRAM = """
name = packed
major = 7
offset = packed_leaf
minor = 1
    push packed_tail
    push packed_total
    push mem, u32
    push r, arg0
    log 3
    push 8
    push packed_loop
    log mrf
    sx caught
    push 16
    push 0x10
    log str
caught:
    exit
"""

TEMPLATES = """
major = 7
minor = 1
desc  = "packed_leaf is called"
fmt   = "n=%d total=%u by %a"
fmt   = "code starts with %*02bx, name=%*s"
"""

ENGINES = ("ptrace", "ebpf")


def need(engine: str) -> None:
    if engine == "ebpf":
        require_bpf()
        require_initial_namespace()


class Places:
    """A machine with the program and its templates, and one with neither."""

    def __init__(self, directory: Path, program: Path) -> None:
        self.program = directory / "packed"
        shutil.copy(program, self.program)
        offset = self._code_offset
        self._code = self.program.read_bytes()[offset : offset + 8]
        self.home, self.elsewhere = directory / "home", directory / "elsewhere"
        for path in (self.home, self.elsewhere, self.home / "templates", directory / "poor"):
            path.mkdir()
        (self.home / "p.rpn").write_text(PROGRAM)
        (self.home / "templates" / "templates.lst").write_text("/* ours */ 7 packed.fmt\n")
        (self.home / "templates" / "packed.fmt").write_text(TEMPLATES)
        (directory / "poor" / "sitecustomize.py").write_text(REFUSE)
        self._poor = {**environment(), "PYTHONPATH": f"{directory / 'poor'}:{environment().get('PYTHONPATH', '')}"}

    def dprobes(self, *words: str) -> str:
        """Run a command line on the one machine."""
        return self._call(self.home, environment(), words)

    def there(self, *words: str) -> str:
        """Run it on the other one, where nothing but a trace file is."""
        return self._call(self.elsewhere, self._poor, words)

    @staticmethod
    def _call(directory: Path, env: dict[str, str], words: tuple[str, ...]) -> str:
        done = subprocess.run(
            [*DPROBES, *words], cwd=directory, env=env, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def strings(self, caller: str) -> list[str]:
        """Return what the three calls of 'packed 3' are to look like."""
        start = f"code starts with {self._code.hex(' ')}, name=<fault at 0x10>"
        calls = ((0, 1000), (2, 1000), (4, 1002))  # packed_total is changed between the calls: see packed.c
        return [f"packed_leaf is called\nn={n} total={total} by {caller}\n{start}" for n, total in calls]

    @property
    def _code_offset(self) -> int:
        """Where packed_loop is in the file, by another tool's account."""
        symbols = subprocess.run(["nm", str(self.program)], capture_output=True, text=True, check=True).stdout
        (address,) = re.findall(r"^([0-9a-f]+) t packed_loop$", symbols, re.MULTILINE)
        headers = subprocess.run(
            ["readelf", "-lW", str(self.program)], capture_output=True, text=True, check=True
        ).stdout
        for offset, start, size in re.findall(r"LOAD +0x(\w+) 0x(\w+) 0x\w+ 0x(\w+)", headers):
            if int(start, 16) <= int(address, 16) < int(start, 16) + int(size, 16):
                return int(address, 16) - int(start, 16) + int(offset, 16)
        raise AssertionError("packed_loop is in no segment")


REFUSE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in ("dprobes.preprocessor", "dprobes.rpn.rpn_parser"):
            raise ModuleNotFoundError(f"there is no {name} here", name=name)
sys.meta_path.insert(0, Refuse())
"""


@pytest.fixture(params=[False, True], ids=["x86_64", "i386"])
def places(request: pytest.FixtureRequest, build: Builder, tmp_path: Path) -> Places:
    return Places(tmp_path, build("packed.c", i386=request.param))


def without_headers(text: str) -> list[str]:
    """Return the strings of records without their first lines."""
    return [part.partition("\n")[2].rstrip("\n") for part in re.split(r"^(?=DProbes\()", text, flags=re.MULTILINE)[1:]]


def from_another_machine(trace: Path) -> None:
    """Change the boot id in a trace file."""
    data = trace.read_bytes()
    size = FRAME_HEAD.unpack_from(data)[0]
    said = json.loads(data[FRAME_HEAD.size : FRAME_HEAD.size + size])
    trace.write_bytes(json_frame(1, {**said, "boot_id": "another"}) + data[FRAME_HEAD.size + size :])


@pytest.mark.parametrize("engine", ENGINES)
def test_records_are_printed_alike_where_they_are_made_and_elsewhere(places: Places, engine: str) -> None:
    need(engine)
    command = ("--engine", engine, "--log", "pid,cseip", "--", str(places.program), "3")
    printed = places.dprobes("run", "p.rpn", "--templates", "templates", "--format", "dprobes", *command)
    assert without_headers(printed) == places.strings("packed_tail [packed]")
    assert "[packed" in places.dprobes("run", "p.rpn", "--templates", "templates", "--format", "csv", *command)
    places.dprobes("build", "p.rpn", "--for", str(places.program), "--templates", "templates", "-o", "p.ppdf")
    places.dprobes("run", "p.ppdf", "-o", "t.dpt", *command)
    trace = places.elsewhere / "t.dpt"
    shutil.copy(places.home / "t.dpt", trace)
    form = ("--format", "dprobes")
    assert without_headers(places.there("format", "t.dpt", *form)) == places.strings("packed_tail [packed]")
    first = places.strings("packed_tail [packed]")[0].replace("\n", "\n    ")
    assert re.search(rf"^\[\d+\]  cs=0x\w+  ip=0x\w+  {re.escape(first)}\n", places.there("format", "t.dpt"))
    from_another_machine(trace)
    places.program.rename(places.home / "packed")
    for verb in ("format", "log"):
        # The program is not there, but its names are in the trace file.
        assert without_headers(places.there(verb, "t.dpt", *form)) == places.strings("packed_tail [packed]")
    fields = [json.loads(line)["fields"] for line in places.there("format", "t.dpt", "--format", "json").splitlines()]
    assert [(each["n"], each["total"], each["name"]) for each in fields] == [
        (0, 1000, {"fault": "0x10"}),
        (2, 1000, {"fault": "0x10"}),
        (4, 1002, {"fault": "0x10"}),
    ]


def test_a_run_says_what_its_templates_lack(places: Places) -> None:
    command = [*DPROBES, "run", "p.rpn", "--engine", "ptrace", "--templates", "templates", "--format", "dprobes"]
    done = subprocess.run(
        [*command, "--", str(places.program), "3"], cwd=places.home, env=environment(), capture_output=True,
        text=True, timeout=TIMEOUT, check=True,
    )  # fmt: skip
    note = "dprobes: note: the templates print addresses by name (%a), which needs --log PID,CSEIP\n"
    assert note in done.stderr
    (caller,) = set(re.findall(r" by (0x[0-9a-f]+)\n", done.stdout))
    assert without_headers(done.stdout) == places.strings(caller)
    loaded = dprobes.compile_file(places.home / "p.rpn", modules=[places.program])
    wrong = {"templates.lst": b"7 packed.fmt", "packed.fmt": TEMPLATES.replace("%d", "%y").encode()}
    assert loaded.ppdf is not None
    replace(loaded, ppdf=replace(loaded.ppdf, templates=wrong)).save(places.home / "wrong.ppdf")
    done = subprocess.run(
        [*DPROBES, "run", "wrong.ppdf", "--engine", "ptrace", "--", str(places.program), "3"],
        cwd=places.home, env=environment(), capture_output=True, text=True, timeout=TIMEOUT, check=True,
    )  # fmt: skip
    said = "dprobes: warning: templates of 'wrong.ppdf' have errors, and are not used\npacked.fmt:5:13: error: "
    assert said in done.stderr
    assert "packed_leaf is called" not in done.stdout


@pytest.mark.parametrize("verb", ["format", "log"])
def test_one_template_that_is_wrong_is_left_out(places: Places, verb: str) -> None:
    places.dprobes("run", "p.rpn", "--engine", "ptrace", "-o", "t.dpt", "--", str(places.program), "3")
    directory = places.home / "mixed"
    shutil.copytree(places.home / "templates", directory)
    (directory / "templates.lst").write_text("7 packed.fmt\n8 wrong.fmt\n")
    (directory / "wrong.fmt").write_text('major = 8\nminor = 1\nfmt = "%y"\n')
    done = subprocess.run(
        [*DPROBES, verb, "t.dpt", "--templates", "mixed"], cwd=places.home, env=environment(), capture_output=True,
        text=True, timeout=TIMEOUT, check=True,
    )  # fmt: skip
    assert done.stdout == places.dprobes(verb, "t.dpt", "--templates", "templates")
    assert "is called" in done.stdout
    said = "dprobes: warning: templates of 'mixed' have errors, and are not used\nmixed/wrong.fmt:3:9: error: "
    assert done.stderr.startswith(said)


def test_the_library_formats_what_a_serial_line_gets(places: Places) -> None:
    places.dprobes(
        "run", "p.rpn", "--engine", "ptrace", "--log-target", f"file:{places.home}/t.bin", "--log-format", "binary",
        "--", str(places.program), "3",
    )  # fmt: skip
    code = (
        "import dprobes\n"
        "from dprobes.record.line_frames import FrameDecoder\n"
        "library = dprobes.TemplateLibrary()\n"
        "library.initialise('templates')\n"
        "for frame in FrameDecoder().feed(open('t.bin', 'rb').read()):\n"
        "    print(library.format(frame.record))\n"
        "library.terminate()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=places.home, env=environment(), capture_output=True, text=True,
        timeout=TIMEOUT, check=True,
    )  # fmt: skip
    formatted = places.dprobes("format", "t.bin", "--templates", "templates", "--format", "dprobes")
    assert without_headers(done.stdout) == without_headers(formatted)
    (caller,) = set(re.findall(r" by (0x[0-9a-f]+)\n", formatted))
    assert without_headers(formatted) == places.strings(caller)


def test_the_manager_formats_by_the_templates_that_it_is_sent(places: Places) -> None:
    with contextlib.closing(Sandbox(places.home)) as sandbox:
        command = f"--log-target file:{places.home}/out.txt --log-format dprobes -- {places.program} 3"
        sandbox(f"dprobes insert p.rpn --engine ptrace --templates templates --log pid,cseip {command}")
        printed = ""
        while printed.count("DProbes(7,1)") < 3:
            printed = sandbox("dprobes log --format dprobes")
        sandbox("dprobes remove --all")
        assert without_headers(printed) == places.strings("packed_tail [packed]")
        assert without_headers((places.home / "out.txt").read_text()) == places.strings("packed_tail [packed]")
        mine = places.home / "mine"
        mine.mkdir()
        (mine / "templates.lst").write_text("7 mine.fmt")
        (mine / "mine.fmt").write_text('major = 7\nminor = 1\nfmt = "%d%+8 %r"\n')
        assert re.findall(r"^\d .*$", sandbox("dprobes log --format dprobes --templates mine"), re.MULTILINE) != []
        sandbox("dprobes stop --manager")
