"""
Measure what a handler costs as machine code in the probed process, from the probed instruction on and back to it.

A loop calls a function of one instruction; in its place it then calls a jump to a trampoline with a handler and that
instruction. What is shown is the difference, of the fastest of some rounds.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import TYPE_CHECKING

from table import Measurement

from dprobes.arch import architecture
from dprobes.bpf.lower import Abilities, Request, Tables, lower
from dprobes.bpf.map_layouts import PROBE_ENTRY_SIZE, STATUS_SIZE, MapName, table_map
from dprobes.diagnostics import Diagnostics
from dprobes.engines.inline.entry_reader import SharedRings
from dprobes.engines.inline.shared_memory import Region, SharedArray, SharedHash
from dprobes.native.generated_code import Part, ProcessFacts, Surroundings
from dprobes.native.handler_trampoline import make_trampoline
from dprobes.native.process_page import CLOCK_READING, CLOCK_READINGS
from dprobes.native.routines.handler_ring import RingShape
from dprobes.native.routines.shared_hash_table import TableShape
from dprobes.native.runtime_routines import make_runtime
from dprobes.native.x86.x86_assembler import Condition, Gpr, Operation, X86Assembler
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

    from dprobes.bpf.lower import Lowered

__all__ = ["ABILITIES", "in_process", "loop"]

ROUNDS = 100
CALLS = 20_000
"""Calls of a round, after which the ring is emptied."""

ABILITIES = Abilities(
    sleepable=False,
    writes_memory=True,
    writes_registers=True,
    small_states=True,
    verified=False,
    polled=True,
    named_later=True,
)
ALL = Item.PROCESS_NAME | Item.PID | Item.UID | Item.CS | Item.IP | Item.SS | Item.SP | Item.TIME | Item.TID
WORDS = "push r, rdi; push r, rsi; push r, rdx; push r, rcx; log 4; exit"
HANDLERS = (
    ("nothing", "abort", Item(0)),
    ("a count", "inc lv, 0; abort", Item(0)),
    ("a count under a condition", "push r, rdi; push 1; jge other; abort; other: inc lv, 0; abort", Item(0)),
    ("a record of 4 words", WORDS, Item(0)),
    ("the same with time, process and thread", WORDS, Item.TIME | Item.PID | Item.TID),
    ("the same with all header items", WORDS, ALL),
    ("a value counted by key", "push r, r12; push 1; tally by; abort", Item(0)),
    ("a value counted in a histogram", "push r, rsi; tally in; abort", Item(0)),
    ("a word of memory logged", "push r, rsp; push mem, u64; log 1; exit", Item(0)),
    ("a string of 20 bytes logged", "push 64; push r, r12; log str; exit", Item(0)),
)
_PROBED = b"\x8d\x47\x01"
"""``lea eax, [rdi+1]``"""
_STRING = b"a string of 20 bytes\0"


def in_process(_: Path) -> list[Measurement]:
    """Measure all handlers."""
    return [Measurement(f"in the process, above a call: {what}", _cost(text, items)) for what, text, items in HANDLERS]


def _lowered(text: str, items: Item) -> Lowered:
    target, diagnostics = architecture("x86_64"), Diagnostics()
    tables = "table = by, sum, word; table = in, hist; "
    header = f"name = x; major = 1; vars = 1; logmax = 128; {tables} offset = 0x10; minor = 1; "
    program = parse_source(SourceFile("x", header + text), diagnostics, CompileOptions())
    image = encode(program, target)
    request = Request(
        items=items,
        abilities=ABILITIES,
        wants_tid=items == ALL,
        tables=Tables(states=64, cpus=64),
        vars=1,
        shared_tables=frozenset({0, 1}),
    )
    return lower(image, target, image.handlers[0], Point.of(program, program.definitions[0], 0x10), request)


def _tid_place() -> int | None:
    """Return where the C library has the thread id."""
    code = map_code(bytes.fromhex("64488b042510000000c3"))  # mov rax, fs:0x10; ret
    start = ctypes.CFUNCTYPE(ctypes.c_uint64)(code)()
    words = (ctypes.c_uint32 * 512).from_address(start)
    return next((4 * n for n, word in enumerate(words) if word == threading.get_native_id()), None)


def loop(asm: X86Assembler, target: int) -> int:
    """Write a function that calls what is at ``target`` as often as it is told to; return where it begins."""
    start, again = asm.here, asm.label()
    for register in (Gpr.RBX, Gpr.R12, Gpr.RAX):
        asm.push(register)
    asm.mov(Gpr.RBX, Gpr.RDI)
    asm.mov(Gpr.R12, Gpr.RSI)
    asm.place(again)
    asm.mov(Gpr.RDI, Gpr.RBX)
    asm.call_at(target)
    asm.calculate(Operation.SUB, Gpr.RBX, 1)
    asm.jump_if(Condition.NE, again)
    for register in (Gpr.RAX, Gpr.R12, Gpr.RBX):
        asm.pop(register)
    asm.ret()
    return start


def _cost(text: str, items: Item) -> float:
    lowered = _lowered(text, items)
    with Region(32 << 20) as region:
        region.place = region.own_address
        arrays = {
            MapName.CLAIMS: SharedArray(region, 8, 64),
            MapName.PROBES: SharedArray(region, PROBE_ENTRY_SIZE),
            MapName.STATUS: SharedArray(region, STATUS_SIZE),
            MapName.LOCALS: SharedArray(region, 8),
            MapName.SCRATCH: SharedArray(region, lowered.state.size, 64),
            MapName.ZEROS: SharedArray(region, 64),
            MapName.TABLES_LOST: SharedArray(region, 16),
            table_map(1): SharedArray(region, 1 << 12),
        }
        by_key = SharedHash(region, TableShape(8, 8, 256))
        pages = SharedArray(region, 64, 2)
        rings = SharedRings(region, RingShape(2, 4 << 20))
        CLOCK_READING.pack_into(pages.memory, 64 + CLOCK_READINGS, 0, time.monotonic_ns(), 1 << 31)
        probed, bare = _loops(lowered, {**arrays, table_map(0): by_key, MapName.RING: rings}, pages.place.address)
        string = ctypes.create_string_buffer(_STRING)

        def best(function: Callable[[int, int], int]) -> float:
            fastest = float("inf")
            for _ in range(ROUNDS):
                begin = time.perf_counter_ns()
                function(CALLS, ctypes.addressof(string))
                fastest = min(fastest, time.perf_counter_ns() - begin)
                rings.drain()
            return fastest / CALLS / 1000

        cost = best(probed) - best(bare)
        for array in (*arrays.values(), pages):
            array.close()
        rings.close()
    return cost


def _loops(
    lowered: Lowered, maps: dict[MapName, SharedArray | SharedHash | SharedRings], pages: int
) -> tuple[Callable[[int, int], int], Callable[[int, int], int]]:
    """Return the loops with and without a handler, as functions; the code does not depend on where it stands."""
    rings = maps[MapName.RING]
    assert isinstance(rings, SharedRings)
    shapes = {name: each.shape for name, each in maps.items() if isinstance(each, SharedHash)}
    runtime = make_runtime(X86Operations(0), ProcessFacts(pages, pages + 64, _tid_place()), rings.shape, shapes)
    places = {name: each.place for name, each in maps.items()}
    around = Surroundings(places, runtime.routines, runtime.map_routines, rings=rings.shape, life_mark=pages + 48)

    def rest(asm: X86Assembler) -> None:
        asm.raw(_PROBED)
        asm.ret()

    trampoline = make_trampoline(X86Operations(runtime.code.end), 0x1000, [Part(lowered.assembled, around)], rest)
    asm = X86Assembler(trampoline.end)
    function = asm.here
    rest(asm)
    jump = asm.here
    asm.jump_to(trampoline.address)
    starts = loop(asm, jump), loop(asm, function)
    base = map_code(runtime.code.code + trampoline.code + asm.assemble())
    kind = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)
    probed, bare = (kind(base + start) for start in starts)
    return probed, bare
