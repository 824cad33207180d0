"""Which handlers can run in the process, and what is said of the others."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from dprobes.arch import architecture
from dprobes.arch.x86_processors import X86_64_GO
from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.bpf_instructions import Helper
from dprobes.diagnostics import Diagnostics
from dprobes.engines.inline.handler_trials import (
    Eligibility,
    asks_for_thread,
    obstacle_in_process,
    obstacle_to_module,
    obstacle_to_program,
)
from dprobes.native.generated_code import ProcessFacts
from dprobes.resolve.local_module import resolve
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.source_text import SourceFile
from dprobes.target.probed_module import Module

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType

    from dprobes.rpn.rpn_program import Program

CODE = (
    "long stop(void) { __builtin_trap(); }"
    "long cell; long load(long *p) { return *p + 1; } long plain(long a) { return a * 3; } int main(void) { return 0; }"
    "__attribute__((optimize(2), noipa)) long other(long a) { return a + cell; }"
    "__attribute__((optimize(2), noipa)) long jumping(long a) { return other(a * 2); }"
)


NAMING = "its handler reads the process name or the user id, which only the kernel knows"


@pytest.fixture(scope="module")
def program_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("eligible")
    (directory / "a.c").write_text(CODE)
    path = directory / "eligible"
    subprocess.run(["gcc", "-O1", "-o", path, directory / "a.c"], check=True)
    return path


def parsed(path: Path, body: str, header: str = "") -> Program:
    text = f'name = "{path}"\nlogmax = 64\n{header}{body}\n'
    return parse_source(SourceFile("a.rpn", text), Diagnostics(), CompileOptions(allow_write=True))


def said_of(path: Path, body: str, header: str = "") -> str | None:
    program = parsed(path, body, header)
    (probe,) = resolve(program, Module.load(path), Diagnostics(), allow_write=True).probepoints
    return obstacle_to_program(program) or Eligibility(program).obstacle_to(probe)


def test_most_handlers_can(program_file: Path) -> None:
    assert said_of(program_file, "offset = plain\nminor = 1\npush r, rdi\npush mem, u64\nlog 1\nexit") is None
    header = "vars = 1\ngvars = 1\ncvars = 1\ntvars = 1\ntable = t, count, word\n"
    body = "push 1\npush table, t\npop lv, 0\ninc gv, 0\ninc cv, 0\ninc tv, 0\npush 1\ndelete t\nexit"
    assert said_of(program_file, f"offset = plain\npasscount = 3\nmaxhits = 2\n{body}", header) is None
    assert said_of(program_file, "offset = load\nexit") is None
    assert said_of(program_file, "offset = load\npush 1\nskip") is None
    assert said_of(program_file, "offset = plain\nexit 3") is None
    assert said_of(program_file, "offset = stop\nlogonfault = yes\nminor = 1\nexit") is None
    assert said_of(program_file, "offset = load\nlogonfault = yes\nminor = 1\nexit") is None
    header = "table = by, count, ustack\ntable = other, count\n"
    assert said_of(program_file, "offset = plain\nlog ustack\ntally by\ndelete other\nexit", header) is None
    assert said_of(program_file, "offset = load\nreturn = yes\npush elapsed\nlog 1\nexit") is None
    assert said_of(program_file, "offset = jumping\nreturn = yes\npush elapsed\nlog 1\nexit") is None


@pytest.mark.parametrize(
    ("header", "body", "reason"),
    [
        ("", "offset = plain\npush pmc, page-faults\nlog 1\nexit",
         "its handler reads a performance counter, which needs a system call"),
        ("", "offset = jumping\nreturn = yes\nexit",
         "its function has no return instruction, and is left by jumps only"),
        ("", "offset = plain\nreturn = yes\nexit 1", "its handler ends with 'exit 1'"),
        ("", "offset = plain\nlog ustack\npush 0\npop lp\nexit",
         "its handler takes call stacks, and goes back in the log"),
        ("", "offset = plain\nlog ustack, 3\npush 0\npop r, rbx\nexit",
         "its handler takes call stacks, and changes registers or memory"),
        ("table = by, count, ustack\n", "offset = plain\ntally by\npush 0\npop r, rbx\nexit",
         "its handler takes call stacks, and changes registers or memory"),
        ("table = by, count, ustack\n", "offset = plain\ntally by\ndelete by\nexit",
         "its call stacks go into a table that handlers look at"),
        ("table = by, last, ustack\n", "offset = plain\npush 1\ntally by\nexit",
         "its call stacks go into a table of what came last"),
        ("", "offset = stop\nexit",
         "faults of its instruction cannot be predicted: it always raises a signal"),
        ("", "offset = load\npush 1\npop r, rdi\nexit",
         "its instruction may fault, which may depend on what its handler changes"),
        *(("", f"offset = plain\n{text}\nlog 1\nexit", NAMING)
          for text in ("push uid", 'match comm, "a"', 'match commn, "a"', "push comm")),
        ("table = by, count, comm\n", "offset = plain\ntally by\nexit", NAMING),
    ],
)  # fmt: skip
def test_others_cannot(program_file: Path, header: str, body: str, reason: str) -> None:
    assert said_of(program_file, body, header) == reason


@pytest.mark.parametrize("helper", [Helper.GET_CURRENT_PID_TGID, Helper.KTIME_GET_NS])
def test_who_wants_to_know_its_thread_needs_a_place_where_that_is_known(helper: Helper) -> None:
    asm = Assembler()
    asm.call(helper)
    asm.exit()
    code = asm.assemble()
    asks = helper is Helper.GET_CURRENT_PID_TGID
    assert asks_for_thread(code) is asks
    assert obstacle_in_process(code, ProcessFacts(0, 0, 720)) is None
    problem = obstacle_in_process(code, ProcessFacts(0, 0))
    assert problem == ("the place of thread ids in its memory is unknown" if asks else None)


def test_only_code_for_one_processor_with_large_stacks_can() -> None:
    assert obstacle_to_module(architecture("x86_64")) is None
    assert obstacle_to_module(architecture("i386")) == "jumps are made for x86_64, not for i386"
    assert obstacle_to_module(X86_64_GO) == "stacks of goroutines may have no room for its handler"


def test_what_is_said_of_a_probepoint_does_not_cost_a_look_at_all_handlers(program_file: Path) -> None:
    header = "table = t, count, ustack\n"
    one = parsed(program_file, "offset = plain\ntally t\nexit", header)
    (probe,) = resolve(one, Module.load(program_file), Diagnostics(), allow_write=True).probepoints
    looks = []
    for number in (20, 40):
        bodies = "\n".join(f"offset = plain\nminor = {n}\ntally t\nexit" for n in range(number))
        program = parsed(program_file, bodies, header)
        eligibility, walked = Eligibility(program), Walks()
        sys.setprofile(walked)
        try:
            found = {eligibility.obstacle_to(probe) for _ in range(number)}
        finally:
            sys.setprofile(None)
        assert found == {None}
        looks.append(walked.calls / number)
    assert looks[1] <= looks[0] * 1.1, looks


class Walks:
    """A count of the calls of functions."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        self.calls += event == "call"
