"""
Measure what a return costs whose handler asks for the time since the entry, both in the probed process.

As ``inprocess``, with a function of two instructions: the first one keeps the entry, the second one is its return.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING

from inprocess import ABILITIES, loop
from table import Measurement

from dprobes.arch import architecture
from dprobes.bpf.lower import Placement, Request, Tables, lower
from dprobes.bpf.lower.hits.call_entries import entry_program
from dprobes.bpf.lower.hosts.handler_host import Host
from dprobes.bpf.lower.lowering_request import KeptEntry
from dprobes.bpf.map_layouts import PROBE_ENTRY_SIZE, CallTable, MapName, table_map
from dprobes.diagnostics import Diagnostics
from dprobes.engines.inline.entry_reader import SharedRings
from dprobes.engines.inline.shared_memory import Region, SharedArray
from dprobes.native.generated_code import Part, ProcessFacts, Surroundings
from dprobes.native.handler_trampoline import make_trampoline
from dprobes.native.process_page import CLOCK_READING, CLOCK_READINGS
from dprobes.native.routines.handler_ring import RingShape
from dprobes.native.runtime_routines import make_runtime
from dprobes.native.x86.x86_assembler import X86Assembler
from dprobes.native.x86.x86_operations import X86Operations
from dprobes.platform.linux.call_proxy import map_code
from dprobes.record.log_record import Item
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.rpn.instruction_encoding import encode
from dprobes.rpn.rpn_program import Point
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dprobes.bpf.bpf_assembler import Assembled

__all__ = ["returns_in_process"]

ROUNDS = 100
CALLS = 20_000
HANDLERS = (
    ("a return counted", "inc lv, 0; abort", None),
    ("the time of a call added up", "push elapsed; tally all; abort", KeptEntry()),
    ("the time of a call and its argument added up", "push elapsed; tally all; push entry, rdi; tally all; abort",
     KeptEntry((("edi", 5, None),))),
)  # fmt: skip
_FIRST, _RETURN = b"\x8d\x47\x01", b"\xc3"
"""``lea eax, [rdi+1]``, ``ret``"""


def returns_in_process(_: Path) -> list[Measurement]:
    """Measure all handlers."""
    return [Measurement(f"in the process, above a call: {what}", _cost(text, kept)) for what, text, kept in HANDLERS]


def _lowered(text: str, kept: KeptEntry | None) -> list[Assembled]:
    """Return what runs at the entry, if anything does, and at the return."""
    target = architecture("x86_64")
    header = "name = x; major = 1; vars = 1; table = all, sum; offset = 0x10; return = yes; "
    program = parse_source(SourceFile("x", header + text), Diagnostics(), CompileOptions())
    image = encode(program, target)
    request = Request(
        items=Item(0),
        abilities=ABILITIES._replace(calls=CallTable.of(1)),
        placement=Placement.RET_SITE,
        tables=Tables(states=64, cpus=64),
        vars=1,
        shared_tables=frozenset({0}),
        entry=kept,
    )
    point = Point.of(program, program.definitions[0], 0x10)
    codes = [] if kept is None else [entry_program(target, request, Host).assembled]
    return [*codes, lower(image, target, image.handlers[0], point, request).assembled]


def _cost(text: str, kept: KeptEntry | None) -> float:
    codes = _lowered(text, kept)
    calls = CallTable.of(1)
    with Region(calls.size + (1 << 20)) as region:
        region.place = region.own_address
        arrays = {
            MapName.PROBES: SharedArray(region, PROBE_ENTRY_SIZE),
            MapName.LOCALS: SharedArray(region, 8),
            MapName.ENTRIES: SharedArray(region, calls.size),
            table_map(0): SharedArray(region, 64),
        }
        rings = SharedRings(region, RingShape(2, 4096))
        pages = SharedArray(region, 64, 2)
        CLOCK_READING.pack_into(pages.memory, 64 + CLOCK_READINGS, 0, time.monotonic_ns(), 1 << 31)
        probed, bare = _loops(codes, {**arrays, MapName.RING: rings}, pages.place.address)
        cost = _best(probed) - _best(bare)
        for array in (*arrays.values(), pages):
            array.close()
        rings.close()
    return cost


def _best(function: Callable[[int, int], int]) -> float:
    fastest = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter_ns()
        function(CALLS, 0)
        fastest = min(fastest, time.perf_counter_ns() - begin)
    return fastest / CALLS / 1000


def _loops(
    codes: list[Assembled], maps: dict[MapName, SharedArray | SharedRings], pages: int
) -> tuple[Callable[[int, int], int], Callable[[int, int], int]]:
    """Return the loops with and without handlers, as functions; the code does not depend on where it stands."""
    rings = maps[MapName.RING]
    assert isinstance(rings, SharedRings)
    runtime = make_runtime(X86Operations(0), ProcessFacts(pages, pages + 64), rings.shape, {})
    places = {name: each.place for name, each in maps.items()}
    around = Surroundings(places, runtime.routines, runtime.map_routines, rings=rings.shape, life_mark=pages + 48)

    def returning(asm: X86Assembler) -> None:
        asm.raw(_RETURN)

    last = make_trampoline(X86Operations(runtime.code.end), 0x1003, [Part(codes[-1], around)], returning)
    asm = X86Assembler(last.end)
    at_return = asm.here
    asm.jump_to(last.address)

    def beginning(asm: X86Assembler) -> None:
        asm.raw(_FIRST)
        asm.jump_to(at_return)

    entry = asm.here
    code = asm.assemble()
    if len(codes) > 1:
        first = make_trampoline(X86Operations(entry), 0x1000, [Part(codes[0], around)], beginning)
        code += first.code
    else:
        asm = X86Assembler(entry)
        beginning(asm)
        code += asm.assemble()
    asm = X86Assembler(last.end + len(code))
    jump = asm.here
    asm.jump_to(entry)
    function = asm.here
    asm.raw(_FIRST + _RETURN)
    starts = loop(asm, jump), loop(asm, function)
    base = map_code(runtime.code.code + last.code + code + asm.assemble())
    kind = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)
    probed, bare = (kind(base + start) for start in starts)
    return probed, bare
