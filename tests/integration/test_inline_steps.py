"""A program that single-steps itself, or checks alignment, does not notice handlers in its process."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.support import TIMEOUT
from integration.test_inline import INLINE, ways
from support.instruction_places import places_in, source_of

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner
    from support.instruction_places import Place

PROGRAM = "steps_itself.c"
PATIENT = 5 * TIMEOUT
"""Each instruction of a handler is a stop for a program that steps itself."""

UNALIGNED = "name = steps_itself\nlogmax = 16\noffset = leaf\nminor = 1\npush r, rdi\nlog 1\nexit\n"


def plain(path: Path, *arguments: str) -> str:
    done = subprocess.run([path, *arguments], check=True, capture_output=True, text=True, timeout=TIMEOUT)
    return done.stdout


def places_of(path: Path, *names: str) -> list[Place]:
    """Return the instructions of functions."""
    text = subprocess.run(["nm", "-S", path], check=True, capture_output=True, text=True, timeout=TIMEOUT).stdout
    rows = [row for row in map(str.split, text.splitlines()) if row[-1] in names]
    return places_in(path, [(int(address, 16), int(size, 16)) for address, size, *_ in rows])


@pytest.mark.parametrize("every", [1, 3], ids=["all", "some"])
def test_a_program_that_steps_itself_is_trapped_at_its_own_instructions_only(
    build: Builder, run: Runner, every: int
) -> None:
    path = build(PROGRAM)
    source = source_of(path, places_of(path, "leaf", "work", "with_flags")[::every])
    inline = run.command(source, path, options=INLINE, timeout=PATIENT)
    ptrace = run.command(source, path, timeout=PATIENT)
    assert inline.stdout == ptrace.stdout == plain(path)
    assert any("inline" in ways(inline, minor) for minor in inline.counts)
    assert {minor: counts.hits for minor, counts in inline.counts.items()} == {
        minor: counts.hits for minor, counts in ptrace.counts.items()
    }


def test_handlers_write_where_they_like_though_the_program_checks_alignment(build: Builder, run: Runner) -> None:
    path = build(PROGRAM)
    result = run.command(UNALIGNED, path, "alignment", options=INLINE, timeout=PATIENT)
    assert "inline" in ways(result)
    assert result.stdout == plain(path, "alignment")
    assert [value for (value,) in result.words()] == [value for last in range(1, 6) for value in range(last)]
