"""
Variables of random programs at random instructions: what a hit prints is what gdb prints, "optimized out" included.

Each case is a compiler with its flags. The short form has one program of each case that is cheap to compile.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from typing import TYPE_CHECKING, NamedTuple

import pytest

from integration.debug_comparison import asked, compare
from integration.random_sources import c_sources, go_source, rust_source
from integration.support import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SEED = int(os.environ.get("DPROBES_TORTURE_SEED", "1"))
PLACES = 60
"""Instructions of a program at which all variables are compared."""
LEVELS = ("-O0", "-O1", "-O2", "-O3")
LEAST = 5_000
"""Values that the long form compares at least, each of a function, an instruction and a variable."""


class Case(NamedTuple):
    """A compiler with flags; ``asked_with`` are those of the program that gdb is asked about, if it needs others."""

    compiler: str
    flags: tuple[str, ...]
    asked_with: tuple[str, ...] | None = None

    @property
    def is_plain(self) -> bool:
        return "-O0" in self.flags or "opt-level=0" in self.flags

    def __str__(self) -> str:
        return " ".join((self.compiler, *self.flags))


def c_cases() -> list[Case]:
    """Return the cases of C and C++: each level with each form of debug information."""
    forms: dict[str, list[tuple[str, ...]]] = {
        "gcc": [("-gdwarf-5",), ("-gdwarf-4",), ("-gsplit-dwarf",), ("-fdebug-types-section",), ("-flto",)],
        "g++": [("-gdwarf-5",), ("-gdwarf-4", "-fdebug-types-section"), ("-fdebug-types-section",), ("-flto",)],
        "clang": [("-gdwarf-5",), ("-gdwarf-4",), ("-gsplit-dwarf",)],
        "clang++": [("-gdwarf-5",), ("-gdwarf-4",), ("-fdebug-types-section",)],
    }
    # gdb 13 does not find the lists of locations that clang puts aside; the code is the same.
    return [
        Case(compiler, (level, *form), (level, "-gdwarf-5") if "clang" in compiler and "split" in form[0] else None)
        for level in LEVELS
        for compiler, each in forms.items()
        for form in each
    ]


OTHERS = [
    *(Case("rustc", (f"opt-level={level}",)) for level in range(4)),
    Case("go", ("",)),
    Case("go", ("all=-N -l",)),
    Case("go", ("all=-l",)),
]
SHORT = [
    Case("gcc", ("-O0", "-gdwarf-5")),
    Case("gcc", ("-O2", "-gdwarf-5")),
    Case("g++", ("-O2", "-fdebug-types-section")),
    Case("clang", ("-O2", "-gdwarf-5")),
    Case("clang++", ("-O0", "-gdwarf-5")),
    Case("rustc", ("opt-level=2",)),
    Case("go", ("",)),
]
"""A case of each compiler, in half a minute."""

NAMES = {"rustc": r".*sources?2f\d.*|.*\df\d17h[0-9a-f]{16}E", "go": r"main\.f\d"}
C_NAMES = r"(_ZN2n.*)?\d?f[ab]\d.*"


def compiled(directory: Path, case: Case, seed: int, flags: Sequence[str]) -> Path:
    """Return a random program, compiled with flags."""
    if shutil.which(case.compiler) is None:
        pytest.skip(f"{case.compiler} is not installed")
    directory.mkdir(exist_ok=True)
    chance, program, environment = random.Random(f"{case.compiler}{seed}"), directory / "random", dict(os.environ)
    match case.compiler:
        case "go":
            (directory / "main.go").write_text(go_source(chance))
            environment |= {"GOCACHE": str(directory.parent / "cache"), "GOFLAGS": "-mod=mod"}
            command = ["go", "build", *(f"-gcflags={flag}" for flag in flags if flag), "-o", str(program), "main.go"]
        case "rustc":
            (directory / "random.rs").write_text(rust_source(chance))
            words = (*flags, "relocation-model=static", "overflow-checks=off", "debuginfo=2")
            command = ["rustc", "-A", "warnings", *(f"-C{word}" for word in words), "random.rs", "-o", str(program)]
        case _:
            files = c_sources(chance, is_cpp=case.compiler.endswith("++"))
            for name, text in files:
                (directory / name).write_text(text)
            words = ("-g", "-w", "-fwrapv", "-no-pie", "-fno-pie", *flags)
            command = [case.compiler, *words, *(name for name, _ in files), "-o", str(program)]
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=10 * TIMEOUT, check=False
    )
    if done.returncode and case.compiler == "rustc" and "linking with" in done.stderr:
        pytest.skip(f"rustc cannot compile here: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    return program


def compared(case: Case, directory: Path, seed: int, places: int) -> int:
    """Return how many values of a random program were equal to gdb's."""
    program = compiled(directory / "own", case, seed, case.flags)
    other = program if case.asked_with is None else compiled(directory / "asked", case, seed, case.asked_with)
    pattern = NAMES.get(case.compiler, C_NAMES)
    is_joined, is_slow = "-flto" in case.flags, case.flags == ("all=-N -l",)
    answers = asked(
        other,
        directory,
        seed,
        pattern=pattern,
        count=places,
        is_plain=case.is_plain,
        is_joined=is_joined,
        is_slow=is_slow,
    )
    return compare(program, answers, directory, least=20, is_plain=case.is_plain)


@pytest.mark.parametrize("case", SHORT, ids=str)
def test_variables_of_a_random_program_are_those_of_gdb(tmp_path: Path, case: Case) -> None:
    assert compared(case, tmp_path, SEED, PLACES // 2) >= 20


@pytest.mark.torture
def test_variables_of_many_random_programs_are_those_of_gdb(tmp_path: Path) -> None:
    total, failures = 0, []
    for number, case in enumerate([*c_cases(), *OTHERS]):
        directory = tmp_path / str(number)
        directory.mkdir()
        try:
            total += compared(case, directory, SEED + number, PLACES)
        except AssertionError as error:
            failures.append(f"{case}, seed {SEED + number}: {error}")
        shutil.rmtree(directory)
    assert failures == []
    assert total >= LEAST
