"""What is said of programs in DProbes C is said in C, at its places: all of it at once, and what hits came upon."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from integration.support import TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder

ENGINES = ["ptrace", pytest.param("ebpf", marks=pytest.mark.skipif(os.geteuid() != 0, reason="ebpf needs root"))]


@pytest.fixture
def program(build: Builder) -> Path:
    return build("served.c", "-O1", "-g")


def dprobes(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dprobes", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)


def test_wrong_handlers_and_wrong_places_are_told_together(program: Path, tmp_path: Path) -> None:
    source = tmp_path / "wrong.dpc"
    source.write_text(f"""module "{program}";
nope(x) {{ printf("%d", x); }}
serve(req) {{ prinf("x"); }}
watch w nothing {{ printf("%d", undefined); }}
[opcode 0x11] finish {{ @++; }}
errors {{ @++; }}
""")
    done = dprobes("check", str(source))
    assert done.returncode == 2
    said = [line.removeprefix(f"{source}:") for line in done.stderr.splitlines() if not line.startswith("    ")]
    opcode = next(line for line in said if "MISMATCH" in line).split("opcode ")[1][:4]
    mismatch = next(line for line in said if "MISMATCH" in line)
    assert said == [
        f"2:1: error: '{program}' has no symbol 'nope'",
        "3:14: error: there is no function 'prinf'",
        "hint: did you mean 'printf'?",
        f"4:1: error: '{program}' has no symbol 'nothing'",
        "4:32: error: nothing is named 'undefined'",
        "hint: for a variable of the module, declare it: extern int undefined;",
        mismatch,
        f"hint: if the place is right, write '[opcode {opcode}]' before the place",
        f"6:1: error: 'errors' in '{program}' is data, not code",
        "hint: to see who uses it, write 'watch w errors' (or rw)",
    ]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("statements", "reason"),
    [
        ("seen[code + 4]++;", "an index that the array does not have"),
        ("@x = last(10 / (code - code));", "a division by zero"),
        ("@x = last(deeper(code));", "calls nested too deep"),
        ("while (code >= 0) { }", "more jumps than jmpmax allows"),
        ("@x = last(*(int *)(long)code);", "memory that is not there"),
        ('printf("%d", 10 / (code - code));', "a division by zero"),
        ('printf("%d %d", code, seen[code + 4]);', "an index that the array does not have"),
        ('if (code >= 0) printf("%d", deeper(code));', "calls nested too deep"),
    ],
)
def test_faults_have_the_words_of_c(program: Path, engine: str, statements: str, reason: str) -> None:
    source = f'module "{program}";\nstatic long seen[4];\nint deeper(int n) {{ return deeper(n + 1); }}\n'
    done = dprobes("run", "-e", f"{source}finish(code) {{ {statements} }}", "--engine", engine, "--", str(program))
    assert f"5 faults at -e:4: {reason}\n" in done.stderr


@pytest.mark.parametrize(
    ("statement", "message", "hint"),
    [
        ('printf("%d", reg("cr3"));', "'reg(\"cr3\")' needs control, debug and model-specific registers",
         "use --engine gdb=ENDPOINT, where a stub stands for such a machine or process"),
        ('printf("%k", kstack());', "'kstack()' needs the call stack in the kernel", "use --engine ebpf"),
    ],
)  # fmt: skip
def test_what_an_engine_lacks_is_named_as_written(program: Path, statement: str, message: str, hint: str) -> None:
    source = f'module "{program}"; finish(code) {{ {statement} }}'
    done = dprobes("run", "-e", source, "--engine", "ptrace", "--", str(program))
    assert done.returncode == 2
    assert f"error: {message}, which the ptrace engine lacks\n" in done.stderr
    assert f"hint: {hint}\n" in done.stderr
