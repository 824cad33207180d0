"""Samplers of a program: which definitions they are, and how they are named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.diagnostics import Diagnostics
from dprobes.resolve.codeless_probes import resolve_samplers
from dprobes.resolve.probepoints import ProbeKind, ProbeState
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.rpn.rpn_program import Sampler
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from dprobes.rpn.rpn_program import Program


def program(text: str) -> Program:
    return parse_source(SourceFile("x.rpn", text), Diagnostics(), CompileOptions())


def test_samplers_keep_the_numbers_of_their_definitions() -> None:
    source = program(
        "name = m\noffset = 0\nexit\nsampler = 99hz\nminor = 1\nexit\nsampler = 500 page-faults\nminor = 2\nexit\n"
    )
    found = resolve_samplers(source, "/lib/m")
    assert [(each.number, each.sampler, each.where, each.path) for each in found] == [
        (1, Sampler(99), "99hz", "/lib/m"),
        (2, Sampler(500, "page-faults"), "500 page-faults", "/lib/m"),
    ]
    assert {(each.kind, each.state) for each in found} == {(ProbeKind.SAMPLER, ProbeState.COMPILED)}
    assert [each.definition.minor for each in found] == [1, 2]
