"""Go: arguments are in Go's registers, those of functions of C in C's, and returns do no harm to the program."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.support import DPROBES, PROGRAMS, TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Runner

SUM = """offset = main.Sum
minor = 1
{pushes}
log 9
exit
offset = main.Sum
minor = 2
return = yes
push r, retval
log 1
exit
""".format(pushes="\n".join(f"push r, arg{n}" for n in range(8, -1, -1)))

SCALE = """offset = ("main.(*Pair).Scale")
minor = 3
push r, arg1
log 1
push r, arg3
push r, arg2
log str
exit
offset = scaled
minor = 4
push r, arg1
push r, arg0
log 2
exit
"""


@pytest.fixture(scope="module")
def godemo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("go") is None:
        pytest.skip("go is not installed (golang-go)")
    directory = tmp_path_factory.mktemp("go")
    directory.chmod(0o755)
    environment = os.environ | {"GOCACHE": str(directory / "cache"), "GOFLAGS": "-mod=mod", "CGO_ENABLED": "1"}
    command = ["go", "build", "-o", str(directory / "godemo"), "."]
    subprocess.run(command, cwd=PROGRAMS / "godemo", env=environment, check=True, timeout=10 * TIMEOUT)
    shutil.rmtree(directory / "cache", ignore_errors=True)
    return directory / "godemo"


@pytest.fixture(params=["ptrace", "ebpf"])
def engine(request: pytest.FixtureRequest) -> list[str]:
    if request.param == "ebpf":
        require_bpf()
        require_initial_namespace()
    return ["--engine", request.param]


def without_repetitions(values: list[list[int]]) -> list[list[int]]:
    """Return hits without those that the runtime repeats: it begins a function anew when its goroutine must wait."""
    return [value for value, _ in itertools.groupby(values)]


def test_arguments_and_results_are_what_the_program_prints(godemo: Path, run: Runner, engine: list[str]) -> None:
    result = run(f'name = "{godemo}"\n{SUM}{SCALE}', ["--", str(godemo), "9"], engine)
    assert result.status == 0, result.stderr
    sums = [[int(n) for n in line.split()] for line in re.findall(r"^sum (.*)$", result.stdout, re.MULTILINE)]
    assert len(sums) == 9
    assert without_repetitions(result.words(1)) == [numbers[:9] for numbers in sums]
    assert result.words(2) == [numbers[9:] for numbers in sums]
    scaled = re.findall(r"^scaled (\d+) (\d+)", result.stdout, re.MULTILINE)
    assert [[n & 0xFFFFFFFF for n in words] for words in result.words(4)] == [[int(a), int(b)] for a, b in scaled]
    texts = [bytes.fromhex(record["data"]) for record in result.records if record["minor"] == 3]
    assert [text for text, _ in itertools.groupby(texts)] == [
        n.to_bytes(8, "little") + b"\x01\x05\0name%d" % n for n in range(9)
    ]
    assert result.stdout.endswith("deep 2000\n")


def test_returns_of_functions_whose_stack_moves_are_all_seen(godemo: Path, run: Runner, engine: list[str]) -> None:
    text = f'name = "{godemo}"\noffset = main.Deep\nminor = 1\nreturn = yes\npush r, retval\nlog 1\nexit\n'
    result = run(text, ["--", str(godemo), "0"], engine)
    assert result.status == 0, result.stderr
    assert result.stdout == "deep 2000\n"
    assert result.words(1) == [[n] for n in range(2001)]


def test_programs_in_c_know_parameters_arguments_and_results_by_debug_information(
    godemo: Path, engine: list[str]
) -> None:
    text = """
    main.Sum(x, b, c, d, e, f, g, h, last) { printf("sum %d %d %d %d", a, i, arg6, last); }
    return main.Sum { printf("is %d", retval); }
    "main.(*Pair).Scale" { printf("scale %d %s %d", n, mem(name.str, name.len), p->A); }
    return "main.(*Pair).Scale" { printf("text %d %s", retval, mem(reg("rbx"), reg("rcx"))); }
    """
    command = [*DPROBES, "run", "-e", text, *engine, "--", str(godemo), "9"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT)
    sums = [[int(n) for n in line.split()] for line in re.findall(r"^sum (.*)$", done.stdout, re.MULTILINE)]
    said = [line.split("]  ", 1)[1] for line in done.stdout.splitlines() if "]  " in line]
    lines = {
        word: [text for text, _ in itertools.groupby(line for line in said if line.startswith(word))]
        for word in ("sum", "is", "scale", "text")
    }
    assert lines["sum"] == [f"sum {n[0]} {n[8]} {n[6]} {n[8]}" for n in sums]
    assert lines["is"] == [f"is {n[9]}" for n in sums]
    assert lines["scale"] == [f"scale {n} name{n} 3" for n in range(9)]
    assert lines["text"] == [f"text {3 * n + 4} name{n}!" for n in range(9)]


def test_what_has_its_arguments_elsewhere_is_refused_or_left_out(godemo: Path) -> None:
    def said(text: str, *command: str) -> str:
        done = subprocess.run(
            [*DPROBES, *command], input=f'name = "{godemo}"\n{text}', capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr

    refused = said('offset = "internal/cpu.cpuid.abi0"\npush r, arg0\nlog 1\nexit\n', "check", "-")
    assert (
        "error: 'internal/cpu.cpuid.abi0' takes its arguments on the stack (Go's ABI0), not in registers\n" in refused
    )
    assert (
        "hint: push what is on the stack: 'push r, sp', 'push 8', 'add', 'push mem, u64' is the first word there\n"
        in refused
    )
    assert said('offset = "internal/cpu.cpuid.abi0"\nexit\n', "check", "-") == ""
    procedure = "proc first\npush r, arg0\nlog 1\nendproc\noffset = scaled\ncall first\nexit\n"
    assert (
        "error: 'arg0' in a procedure is an argument of Go, and 'scaled' is a function of C\n"
        "    push r, arg0\n            ^~~~\n"
        "hint: push the argument in the handler, and let the procedure take it from the stack\n"
    ) in said(procedure, "check", "-")
    shown = said('offset = "internal/cpu.*"\npush r, arg0\nlog 1\nexit\n', "show", "-")
    assert re.search(
        r"^// left out \d+, because it has its arguments on the stack \(Go's ABI0\): internal/cpu.cpuid.abi0",
        shown, re.MULTILINE,
    )  # fmt: skip
    assert (
        "because it is a function of C, and the pattern's other arguments are in Go's registers: main, scaled\n"
        in said('offset = "[ms][ac][ai][ln]*"\npush r, arg0\nlog 1\nexit\n', "show", "-")
    )


def test_locate_and_show_say_which_convention_holds(godemo: Path) -> None:
    def located(place: str) -> str:
        done = subprocess.run([*DPROBES, "locate", f"{godemo}:{place}"], capture_output=True, text=True, check=True)
        return next(line for line in done.stdout.splitlines() if line.startswith("arguments"))

    said = subprocess.run(["go", "version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"go(\d+\.\d+)", said)
    assert version is not None
    assert located("main.Sum") == (
        "arguments Go's registers (ABIInternal): arg0 to arg8 are rax, rbx, rcx, rdi, rsi, r8, r9, r10 and r11; "
        f"Go {version[1]}"
    )
    assert located("scaled") == f"arguments C's registers (System V ABI); Go {version[1]}"
    assert located('"internal/cpu.cpuid.abi0"') == f"arguments the stack (Go's ABI0); Go {version[1]}"
    text = f'name = "{godemo}"\noffset = scaled\nexit\n'
    shown = subprocess.run([*DPROBES, "show", "-"], input=text, capture_output=True, text=True, check=True).stdout
    assert "// Go: arg0 to arg8 are rax, rbx, rcx, rdi, rsi, r8, r9, r10, r11 (ABIInternal)\n" in shown
    assert "// a function of C: arg0 to arg5 are rdi, rsi, rdx, rcx, r8, r9\n" in shown


def test_entries_are_refused_where_stacks_move(godemo: Path, run: Runner) -> None:
    source = f'name = "{godemo}"\noffset = main.Sum\nreturn = yes\npush elapsed\nlog 1\nexit\n'
    for engine in ("ptrace", "ebpf"):
        refused = run(source, ["--", str(godemo)], ["--engine", engine])
        assert refused.status == 2
        why = "Go moves the stacks of goroutines while their functions run"
        assert f"error: the entries of calls cannot be distinguished: {why}\n" in refused.stderr
