"""A real program that dies of a fault: each instruction has the same hits with handlers in the process as without."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from iced_x86 import Decoder

from dprobes.errors import DprobesError
from dprobes.target.probed_module import Module

if TYPE_CHECKING:
    from integration.support import Result, Runner

PYTHON = Path("/usr/bin/python3")
FUNCTION = "PyBytes_FromStringAndSize"
COUNT, CALLS = 40, 300
CODE = (
    "import ctypes, time; time.sleep(4); place = ctypes.create_string_buffer(b'abc');"
    f"print(all(ctypes.string_at(place, 1) == b'a' for _ in range({CALLS})), flush=True); ctypes.string_at(16, 1)"
)


def first_instructions() -> list[int]:
    """Return how far from its beginning the instructions of the function are, which reads a string of one byte."""
    try:
        module = Module.load(PYTHON.resolve())
        start = module.file_offset(module.address_of(FUNCTION))
    except DprobesError as error:
        pytest.skip(f"{PYTHON}: {error.message}")
    raw = PYTHON.resolve().read_bytes()[start : start + 15 * COUNT]
    return [instruction.ip for instruction, _ in zip(Decoder(64, raw), range(COUNT), strict=False)]


def test_a_program_that_dies_in_a_probed_function(run: Runner) -> None:
    places = first_instructions()

    def probed(engine: str) -> Result:
        source = "".join(f"offset = {FUNCTION} + {place}\nminor = {place}\nabort\n" for place in places)
        target = ["--exit-status", "--", str(PYTHON), "-I", "-c", CODE]
        return run(f'name = "{PYTHON.resolve()}"\n{source}', target, ["--engine", engine])

    inside, outside = probed("inline"), probed("ptrace")
    assert (inside.status, inside.stdout) == (outside.status, outside.stdout) == (139, "True\n")
    ways = [counts.executed for counts in inside.counts.values()]
    assert sum("inline" in way for way in ways) >= 0.8 * len(ways)
    hits = {place: counts.hits for place, counts in inside.counts.items()}
    assert hits == {place: counts.hits for place, counts in outside.counts.items()}
    assert hits[0] > CALLS
