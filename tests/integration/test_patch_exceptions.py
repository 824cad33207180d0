"""Live patches in C++ through whose code exceptions pass: the first thread that calls one registers its tables."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ptrace.patching.live_patches import insert_patch, plan_patch, remove_patch
from dprobes.engines.ptrace.patching.patch_records import patches_of
from dprobes.errors import TargetError
from integration.support import PROGRAMS, TIMEOUT, await_line, running
from support.rounds import rounds

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.support import Builder

ORIGINAL = "80 -8 0"
"""Eight threads: 5 * 2 each, an exception each, and no Guard is left."""


@pytest.fixture
def throwing(build: Builder) -> Iterator[subprocess.Popen[str]]:
    with running(build("pricing.cc", compiler="g++"), stdin=subprocess.PIPE) as process:
        assert await_line(process) == f"{ORIGINAL}\n"
        yield process


@pytest.fixture
def catching(build: Builder) -> Path:
    found = subprocess.run(
        ["g++", "-print-file-name=crtendS.o"], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    return build("catching.cc", "-shared", "-fPIC", "-nostartfiles", found.stdout.strip(), compiler="g++")


def ask(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return await_line(process).rstrip("\n")


def test_a_patch_catches_the_exceptions_of_the_original(throwing: subprocess.Popen[str], catching: Path) -> None:
    """In each round, the first calls of all threads coincide; the memory of each patch is another one."""
    for _ in range(rounds(200, 10)):
        record = insert_patch(plan_patch(throwing.pid, catching, "price", None, None)).record
        assert ask(throwing) == f"{8 * 15} {8 * 1000} 0"
        assert ask(throwing) == f"{8 * 15} {8 * 1000} 0"
        assert remove_patch(throwing.pid, record)
        assert ask(throwing) == ORIGINAL


def test_a_patch_throws_and_lets_exceptions_pass(throwing: subprocess.Popen[str], catching: Path) -> None:
    insert_patch(plan_patch(throwing.pid, catching, "strict", "price", None))
    assert ask(throwing) == "-8 -8 0"


def test_stacked_patches_pass_exceptions_on(throwing: subprocess.Popen[str], catching: Path) -> None:
    strict = insert_patch(plan_patch(throwing.pid, catching, "strict", "price", None)).record
    insert_patch(plan_patch(throwing.pid, catching, "price", None, None))
    assert ask(throwing) == f"{8 * 1000} {8 * 1000} 0"  # the lower one throws for 5, the original for 500
    assert remove_patch(throwing.pid, strict)
    assert ask(throwing) == f"{8 * 15} {8 * 1000} 0"


def test_tables_without_an_end_are_refused(throwing: subprocess.Popen[str], build: Builder) -> None:
    path = build("catching.cc", "-shared", "-fPIC", "-nostartfiles", compiler="g++")
    with pytest.raises(TargetError) as caught:
        plan_patch(throwing.pid, path, "price", None, None)
    assert caught.value.message == f"'{path}' throws or handles exceptions, and its tables have no end mark"
    assert caught.value.hint == (
        'link it with "$(g++ -print-file-name=crtendS.o)" as the last file, or compile it -fno-exceptions'
    )
    assert patches_of(throwing.pid) == []


def test_a_program_without_an_unwinder_is_refused(build: Builder) -> None:
    """The object needs nothing of the C++ library but the table of its handler."""
    found = subprocess.run(
        ["g++", "-print-file-name=crtendS.o"], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    flags = ("-shared", "-fPIC", "-nostartfiles", "-fexceptions", found.stdout.strip())
    path = build("cleaning.c", *flags)
    with running(build("replaced.c", "-O1", str(PROGRAMS / "named_twice.c")), stdin=subprocess.PIPE) as process:
        assert await_line(process) == "ready\n"
        with pytest.raises(TargetError) as caught:
            plan_patch(process.pid, path, "work", None, None)
    assert caught.value.message == (
        f"'{path}' throws or handles exceptions, and process {process.pid} has no '__register_frame' for its tables"
    )
    assert caught.value.hint == "compile it -fno-exceptions"
