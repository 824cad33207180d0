"""What is called cheap: the same everywhere, and what each engine says of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.cli.main import run
from dprobes.cli.output.module_listing import PlaceCost, costs_at
from dprobes.target.code.machine_code import first_instructions
from dprobes.target.matching_functions import matching_functions
from dprobes.target.probed_module import Module

if TYPE_CHECKING:
    import pytest

LIBC = Path("/lib/x86_64-linux-gnu/libc.so.6")


def costs(pattern: str) -> dict[str, PlaceCost]:
    module = Module.load(LIBC)
    functions, _ = matching_functions(module, pattern)
    instructions = first_instructions(module, [each.offset for each in functions])
    return {each.name: cost for each, cost in zip(functions, costs_at(module, list(instructions)), strict=True)}


def test_what_is_stepped_with_one_engine_is_not_called_cheap() -> None:
    found = costs("str*")
    assert set(found.values()) <= {
        PlaceCost("cheap", is_cheap=True),
        PlaceCost("cheap with ptrace, slow with ebpf", is_cheap=False),
        PlaceCost("slow: single-stepped", is_cheap=False),
    }
    assert len(set(found.values())) > 1


def test_list_and_locate_say_the_same_as_the_engines(capsys: pytest.CaptureFixture[str]) -> None:
    chosen: dict[str, str] = {}
    for name, cost in costs("str*").items():
        if cost.text not in chosen.values():
            chosen[name] = cost.text
    for name, text in chosen.items():
        assert run(["list", f"{LIBC}:{name}"]) == 0
        assert capsys.readouterr().out.splitlines()[-1].endswith(f"  {text}")
        assert run(["locate", f"{LIBC}:{name}"]) == 0
        located = capsys.readouterr().out
        assert (re.search(r"^=> +[0-9a-f]+ \+", located, re.MULTILINE) is not None) is (text == "cheap")
        engine = next(line for line in located.splitlines() if line.startswith("ebpf: "))
        assert ("is single-stepped, ten times as slow" in engine) is (text != "cheap")
