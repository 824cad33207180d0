"""Where a process has what handlers use of other programs."""

from __future__ import annotations

from dprobes.bpf.map_layouts import MapName
from dprobes.diagnostics import Diagnostics
from dprobes.engines.inline.handler_hits import Borrowed, new_state
from dprobes.engines.shared_globals import GlobalVariables, mapped_size
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.source_text import SourceFile


def test_nothing_is_borrowed_by_a_program_alone() -> None:
    assert Borrowed().parts == ((), 0)
    assert Borrowed().places(()) == {}


def test_variables_and_tables_are_the_principals_and_hits_are_not() -> None:
    text = "name = x\nvars = 2\ntable = t, count\noffset = 0\nexit\n"
    state = new_state(parse_source(SourceFile("a.rpn", text), Diagnostics(), CompileOptions()))
    with GlobalVariables(600) as variables:
        borrowed = Borrowed(state, variables)
        assert borrowed.parts == (((state.region.descriptor, state.region.size),), mapped_size(600))
        places = borrowed.places((0x7000_0000, 0x7800_0000))
    assert places[MapName.GLOBALS].address == 0x7800_0000
    assert 0x7000_0000 < places[MapName.LOCALS].address < 0x7000_0000 + state.region.size
    assert 0x7000_0000 < places[MapName.TABLES_LOST].address < 0x7000_0000 + state.region.size
    assert MapName.PROBES not in places
