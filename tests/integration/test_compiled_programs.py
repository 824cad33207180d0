"""Programs that are compiled where the symbols are, and run where nothing but the stripped file is."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.target.probed_module import Module
from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.ebpf.objects import await_attached
from integration.support import DPROBES, TIMEOUT, await_line, command_line, environment, read_result, running

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner

MACROS = "#define LOG_ALL(n) log n; exit\n"

PROGRAM = """
#include "macros.rpn"
name = packed
major = 7
groupdef = calls loops
typedef = enter leave
offset = packed_leaf
group = calls
type = enter
minor = 1
    push r, FIRST
    push packed_total
    push mem, u32
    LOG_ALL(2)
offset = packed_tail
return = yes
group = calls
type = leave
minor = 2
    push r, retval
    LOG_ALL(1)
offset = "packed_l*p"
group = loops
type = enter
minor = 3
    exit
offset = packed_byte
minor = 4
    exit
"""

REFUSE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in ("pcpp", "elftools", "dprobes.preprocessor", "dprobes.rpn.rpn_parser"):
            raise ModuleNotFoundError(f"there is no {name} here", name=name)
sys.meta_path.insert(0, Refuse())
"""

ENGINES = ("ptrace", "ebpf")


def _call(command: list[str], directory: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, cwd=directory, env=env, capture_output=True, text=True, timeout=TIMEOUT)


class Machines:
    """Keep what is on two machines: sources and symbols on one, a stripped program on the other."""

    def __init__(self, directory: Path, program: Path, i386: bool) -> None:
        self.program = program
        self.home = directory / "home"
        self.target = directory / "target"
        for path in (self.home, self.target, directory / "poor"):
            path.mkdir()
        (directory / "poor" / "sitecustomize.py").write_text(REFUSE)
        self._poor = {**environment(), "PYTHONPATH": f"{directory / 'poor'}:{environment().get('PYTHONPATH', '')}"}
        self.stripped = self.target / "packed"
        subprocess.run(["strip", "-o", str(self.stripped), str(program)], check=True)
        (self.home / "macros.rpn").write_text(MACROS)
        (self.home / "a.rpn").write_text(PROGRAM)
        self.i386 = i386

    def build(self, *options: object, status: int = 0) -> str:
        """Compile the program and return what was said."""
        command = [*DPROBES, "build", "a.rpn", "-D", "FIRST=arg0", "-o", self.target / "a.ppdf", *options]
        done = _call(list(map(str, command)), self.home, environment())
        assert done.returncode == status, done.stderr
        return done.stderr

    def run_here(self, engine: str) -> list[dict[str, Any]]:
        """Run the text of the program on the program with symbols."""
        options = ["-D", "FIRST=arg0"]
        return self._run(self.home, "a.rpn", engine, self.program, options, environment())[0]

    def run_there(
        self, engine: str, *options: str, program: Path | None = None, status: int = 0
    ) -> tuple[list[dict[str, Any]], str]:
        """Run the compiled program on the stripped one, where nothing can be compiled."""
        return self._run(self.target, "a.ppdf", engine, program or self.stripped, options, self._poor, status)

    def python_there(self, code: str) -> subprocess.CompletedProcess[str]:
        return _call([sys.executable, "-c", code], self.home, self._poor)

    @staticmethod
    def _run(
        directory: Path, file: str, engine: str, program: Path, options: Any, env: dict[str, str], status: int = 0
    ) -> tuple[list[dict[str, Any]], str]:
        command = [*DPROBES, "run", file, "--engine", engine, "--format", "json", *options, "--", str(program), "5"]
        done = _call(command, directory, env)
        assert done.returncode == status, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.fixture(params=[False, True], ids=["x86_64", "i386"])
def machines(request: pytest.FixtureRequest, build: Builder, tmp_path: Path) -> Machines:
    return Machines(tmp_path, build("packed.c", i386=request.param), i386=request.param)


def facts(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(r["major"], r["minor"], r["data"], r.get("function")) for r in records]


def need(engine: str) -> None:
    if engine == "ebpf":
        require_bpf()
        require_initial_namespace()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stripped_program_gives_the_records_of_the_original(machines: Machines, engine: str) -> None:
    need(engine)
    machines.build("--for", machines.program)
    expected = machines.run_here(engine)
    assert len(expected) == 20
    records, _ = machines.run_there(engine)
    assert facts(records) == facts(expected)


def test_nothing_can_be_compiled_there(machines: Machines) -> None:
    for module in ("elftools", "dprobes.preprocessor", "dprobes.rpn.rpn_parser"):
        assert f"there is no {module} here" in machines.python_there(f"import {module}").stderr
    (machines.target / "a.ppdf").write_text(PROGRAM)
    machines.run_there("ptrace", status=1)


@pytest.mark.parametrize("engine", ENGINES)
def test_another_build_is_refused_unless_that_is_not_verified(build: Builder, machines: Machines, engine: str) -> None:
    need(engine)
    other = build("packed.c", "-Wl,--build-id=0x1234", i386=machines.i386)
    machines.build("--for", other)
    _, said = machines.run_there(engine, status=1)
    assert "but 'a.ppdf' was built for 1234 ('" in said
    assert "or give --dont-verify-build-id if the code is the same" in said
    records, _ = machines.run_there(engine, "--dont-verify-build-id")
    assert facts(records) == facts(machines.run_here(engine))


@pytest.mark.parametrize("engine", ENGINES)
def test_other_code_is_not_probed(machines: Machines, engine: str) -> None:
    need(engine)
    machines.build("--for", machines.program)
    module = Module.load(machines.program)
    offset = module.file_offset(module.address_of("packed_byte"))
    with machines.stripped.open("r+b") as file:
        file.seek(offset)
        assert file.read(1) == b"\x90"
        file.seek(offset)
        file.write(b"\xfc")  # cld
    records, said = machines.run_there(engine)
    assert said.startswith(
        "a.rpn:27:1: warning: MISMATCH: packed_byte: expected 90, found fc; not inserted\n"
        "    offset = packed_byte\n    ^~~~~~~~~~~~~~~~~~~~\n"
        "hint: build the program for this version of the module, or give --dont-verify-opcodes\n"
    )
    assert len(records) == 15
    records, _ = machines.run_there(engine, "--dont-verify-opcodes")
    assert len(records) == 20


def test_several_builds_are_in_one_file(build: Builder, machines: Machines) -> None:
    other = build("packed.c", "-O2", "-Wl,--build-id=0x1234", i386=machines.i386)
    stripped = machines.target / "other" / "packed"
    stripped.parent.mkdir()
    subprocess.run(["strip", "-o", str(stripped), str(other)], check=True)
    said = machines.build("--for", machines.program, "--for", other)
    assert said.endswith("is for 2 builds of 'packed'\n")
    records, _ = machines.run_there("ptrace")
    again, _ = machines.run_there("ptrace", program=stripped)
    assert facts(records) == facts(again)
    assert len(records) == 20


def feed(process: subprocess.Popen[str]) -> None:
    """Let a running program make one round."""
    assert process.stdin is not None
    process.stdin.write("x")
    process.stdin.flush()
    assert await_line(process) == "\n"


def test_the_ebpf_engine_finds_all_files_of_all_builds(build: Builder, tmp_path: Path) -> None:
    need("ebpf")
    wide, narrow = build("packed.c"), build("packed.c", i386=True)
    stripped = [tmp_path / name / "packed" for name in ("wide", "narrow")]
    for original, copy in zip((wide, narrow), stripped, strict=True):
        copy.parent.mkdir()
        subprocess.run(["strip", "-o", str(copy), str(original)], check=True)
    program, compiled = tmp_path / "all.rpn", tmp_path / "all.ppdf"
    program.write_text("name = packed\noffset = packed_leaf\nminor = 1\npush r, arg0\nlog 1\nexit\n")
    command = [*DPROBES, "build", program, "-o", compiled, "--for", wide, "--for", narrow]
    subprocess.run(list(map(str, command)), check=True, capture_output=True, env=environment(), timeout=TIMEOUT)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE}
    with running(stripped[0], "-", **pipes) as first, running(stripped[1], "-", **pipes) as second:
        feed(first)
        output = tmp_path / "all.json"
        line = command_line(compiled, output, [], ["--engine", "ebpf"])
        with subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
        ) as client:
            await_attached(client)
            for process in (first, second):
                feed(process)
            client.send_signal(signal.SIGINT)
            result = read_result(client, output)
    assert result.status == 0, result.stderr
    found = {record["pid"]: record["data"] for record in result.records}
    assert found == {first.pid: (2).to_bytes(8, "little").hex(), second.pid: (0).to_bytes(4, "little").hex()}


def test_groups_and_types_choose_definitions(machines: Machines) -> None:
    machines.build("--for", machines.program)
    for options, minors in (
        (("--group", "calls"), {1, 2}),
        (("--type", "enter"), {1, 3}),
        (("--group", "calls", "--type", "enter"), {1}),
        (("--group", "LOOPS,calls", "--type", "leave"), {2}),
    ):
        records, _ = machines.run_there("ptrace", *options)
        assert {record["minor"] for record in records} == minors
    _, said = machines.run_there("ptrace", "--group", "call", status=2)
    assert said == (
        "a.rpn:5:1: error: the program has no group 'call'\n    groupdef = calls loops\n"
        "    ^~~~~~~~~~~~~~~~~~~~~~\nhint: did you mean 'calls'?\n"
    )
    _, said = machines.run_there("ptrace", "--group", "loops", "--type", "leave", status=2)
    assert "error: no probe definition has group 'loops' and type 'leave'" in said


def test_the_ebpf_engine_asks_another_file_for_symbols_also_later(build: Builder, tmp_path: Path) -> None:
    need("ebpf")
    original, program = build("packed.c"), tmp_path / "late.rpn"
    # In a directory where nobody would look for it: only its process leads there.
    stripped = tmp_path / "packed"
    subprocess.run(["strip", "-o", str(stripped), str(original)], check=True)
    program.write_text("name = packed\noffset = packed_leaf\nminor = 1\nexit\n")
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE}
    with running(stripped, "-", **pipes) as process:
        feed(process)
        output = tmp_path / "late.json"
        line = command_line(program, output, [], ["--engine", "ebpf", "--sym", str(original)])
        with subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd=tmp_path.parent
        ) as client:
            await_attached(client)
            feed(process)
            client.send_signal(signal.SIGINT)
            result = read_result(client, output)
    assert result.status == 0, result.stderr
    assert [record["pid"] for record in result.records] == [process.pid]


def test_an_opcode_of_the_program_is_not_verified_if_that_is_asked_for(build: Builder, run: Runner) -> None:
    program = "name = packed\noffset = packed_leaf\nopcode = 0\nminor = 1\nexit\n"
    target = ["--", str(build("packed.c")), "5"]
    refused = run(program, target)
    assert "warning: MISMATCH: opcode " in refused.stderr
    assert refused.records == []
    assert len(run(program, target, ["--dont-verify-opcodes"]).records) == 5
