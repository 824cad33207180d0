"""
Memory that grows after probes were inserted: the heap and the stack get what they get without probes.

How far a heap may grow depends on where it is: it follows a program at a random distance, or directly.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from integration.support import Builder, Runner

ADDR_NO_RANDOMIZE = 0x0040000
EVERYTHING = "name = growing\noffset = *\nabort\n"
SOME = "name = growing\n" + "".join(f"offset = {name}\nabort\n" for name in ("called", "deeper", "main"))
KINDS = {
    "pie": (["-pie", "-fpie"], EVERYTHING),
    "at fixed addresses": (["-no-pie", "-fno-pie"], EVERYTHING),
    "static": (["-static"], SOME),
    "static pie": (["-static-pie"], SOME),
}


def not_random() -> None:
    """Let the heap follow the program directly, and libraries and the stack be as near as may be."""
    ctypes.CDLL(None).personality(ADDR_NO_RANDOMIZE)


@pytest.mark.parametrize("engine", ["inline", "ptrace"])
@pytest.mark.parametrize("is_random", [True, False], ids=["random", "not random"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_heap_of_a_program_grows_as_without_probes(
    build: Builder, run: Runner, kind: str, is_random: bool, engine: str
) -> None:
    flags, probes = KINDS[kind]
    program = build("growing.c", *flags)
    before = None if is_random else not_random
    result = run(probes, ["--exit-status", "--", str(program), "1500", "6"], ["--engine", engine], preexec_fn=before)
    assert (result.status, result.stdout) == (0, "1500 MiB of heap, 6 MiB of stack\n"), result.stderr
    assert "by a breakpoint" not in result.stderr, result.stderr
