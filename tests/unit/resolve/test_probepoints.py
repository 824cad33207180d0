"""What sinks and formatters are told of the place of a probepoint."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.record.record_origin import Place
from dprobes.resolve.local_module import resolve
from dprobes.resolve.probepoints import places_of
from dprobes.rpn.compilation_passes import parse_source
from dprobes.source_text import SourceFile
from dprobes.target.probed_module import Module

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
__attribute__((noinline)) int one(int n) { return n + 1; }
__attribute__((noinline)) int two(int n) { return n + 2; }
int main(int n, char **v) { return one(n) + two(n); }
"""
PROGRAM = "name = places\noffset = one\nexit\noffset = one\nreturn = yes\nexit\noffset = two\nreturn = yes\nexit\n"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_place_says_whether_entry_and_return_of_a_function_are_probed(tmp_path: Path) -> None:
    source, path = tmp_path / "places.c", tmp_path / "places"
    source.write_text(SOURCE)
    subprocess.run(["gcc", "-O1", "-o", path, source], check=True)
    program = parse_source(SourceFile("places.rpn", PROGRAM), Diagnostics())
    probes = resolve(program, Module.load(path), Diagnostics()).probepoints
    expected = [
        Place("places", "one", is_paired=True),
        Place("places", "one", "one", at_return=True, is_paired=True),
        Place("places", "two", "two", at_return=True),
    ]
    assert places_of("places", probes) == expected
    assert places_of("places", probes, 1) == expected[1:]
