"""
A process whose libraries jump to trampolines works as before, at all of their functions or thousands of instructions.

It puts the jumps over its own code (``programs/patches_itself.py``), as plans of ``platform/x86/patches`` say: what
executes them is this processor, and what they disturb shows in the results.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.target.probed_module import Module
from integration.ebpf.kernel import uprobes
from integration.support import TIMEOUT

if TYPE_CHECKING:
    from integration.support import Builder

PROGRAM = Path(__file__).parents[1] / "programs" / "patches_itself.py"
PYTHON = Path(sys.executable).resolve().name
"""The program for fixed addresses, or the position-independent one, that this test itself runs in."""
ROUND_TIMEOUT = 10 * TIMEOUT
TORTURE_SECONDS = float(os.environ.get("DPROBES_TORTURE_SECONDS", "600")) / 4


def outcome(library: Path, *modules: str) -> tuple[str, list[tuple[int, int, int]]]:
    """Return the output of the work, and of each module how many sites were placed, refused and hit."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *modules],
        capture_output=True,
        text=True,
        timeout=ROUND_TIMEOUT,
        check=False,
        env={**os.environ, "LOADED": str(library)},
    )
    assert done.returncode == 0, f"{modules}: {done.returncode}: {done.stderr}"
    return done.stdout, [
        (int(placed), int(refused), int(hit))
        for placed, refused, hit in (counts.split("/") for counts in done.stderr.split())
    ]


@functools.cache
def unchanged(library: Path) -> str:
    return outcome(library)[0]


def loaded(name: str) -> str:
    """Return the file name that a library has when it is loaded."""
    return Path(f"/usr/lib/x86_64-linux-gnu/{name}").resolve().name


def caught(build: Builder, *flags: str) -> Path:
    return build("caught.cpp", "-shared", "-fPIC", "-lstdc++", *flags)


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("libsqlite3.so.0", 0.999),
        ("libcrypto.so.3", 0.999),
        ("libc.so.6", 0.999),
        ("libstdc++.so.6", 0.999),
        (PYTHON, 0.8),  # at fixed addresses, its heap begins anywhere: that leaves little room for jumps, or much
    ],
)
def test_all_functions_of_a_module(build: Builder, name: str, share: float) -> None:
    library = caught(build, "-O2")
    output, ((placed, refused, hit),) = outcome(library, name if name == PYTHON else loaded(name), "functions", "1")
    assert output == unchanged(library)
    assert placed >= share * (placed + refused)
    assert hit > 20


def test_a_uprobe_that_somebody_inserts_in_a_patched_library_and_removes_changes_nothing(build: Builder) -> None:
    library = caught(build, "-O2")
    libc = Module.load(f"/usr/lib/x86_64-linux-gnu/{loaded('libc.so.6')}")
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), loaded("libc.so.6"), "functions", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "LOADED": str(library), "WAITS": ""},
    ) as target:
        assert target.stderr is not None
        assert target.stderr.readline() == "patched\n"
        with uprobes(libc.path, [libc.file_offset(libc.address_of("_exit"))]):
            pass
        output, _ = target.communicate("\n", timeout=ROUND_TIMEOUT)
    assert (target.returncode, output) == (0, unchanged(library))


@pytest.mark.parametrize("what", ["1500", "3000"], ids=["puns first", "windows first"])
def test_random_instructions_of_all_modules_at_once(build: Builder, what: str) -> None:
    library = caught(build, "-O2")
    names = (loaded("libsqlite3.so.0"), loaded("libcrypto.so.3"), loaded("libc.so.6"), loaded("libstdc++.so.6"), PYTHON)
    output, counts = outcome(library, *(word for name in names for word in (name, what, "7")))
    assert output == unchanged(library)
    for name, (placed, refused, hit) in zip(names, counts, strict=True):
        assert placed >= (0.97 if name == PYTHON else 0.99) * (placed + refused)
        assert hit > 0


@pytest.mark.parametrize("flags", [("-O0",), ("-O2",), ("-Os", "-fcf-protection")], ids=["O0", "O2", "marks"])
@pytest.mark.parametrize("what", ["100000", "100000w", "250", "250w"])
def test_exceptions_pass_through_displaced_calls(build: Builder, flags: tuple[str, ...], what: str) -> None:
    library = caught(build, *flags)
    output, ((placed, refused, hit), *_) = outcome(
        library, library.name, what, "3", loaded("libgcc_s.so.1"), "2000", "3"
    )
    assert output == unchanged(library)
    # All at once they are in each other's way, and more so where the stack is less than 16 GiB above the libraries: it
    # may grow as far as that, so all jumps lead down from there. The kernel does that to one process in some dozens.
    assert placed >= 0.88 * (placed + refused)
    assert hit > 0.5 * placed


@pytest.mark.torture
@pytest.mark.parametrize("name", ["libsqlite3.so.0", "libcrypto.so.3", "libc.so.6", PYTHON])
def test_random_instructions_with_new_seeds(build: Builder, name: str) -> None:
    library = caught(build, "-O2")
    end, seed = time.monotonic() + TORTURE_SECONDS, 100
    while time.monotonic() < end:
        for what in ("1900", "20000", "functions"):
            output, _ = outcome(library, name if name == PYTHON else loaded(name), what, str(seed))
            assert output == unchanged(library), f"{name} {what} {seed}"
        seed += 1
