"""A return finds the entry of its own call, whatever other calls there are in the table of the process."""

from __future__ import annotations

import ctypes
import mmap
import struct
from typing import TYPE_CHECKING

import pytest

from dprobes.arch import architecture
from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.bpf_instructions import Helper, Register
from dprobes.bpf.lower.hits.call_entries import table_entry_program, take_from_table
from dprobes.bpf.lower.hosts.handler_host import CONTEXT, Host
from dprobes.bpf.lower.hosts.hit_thread import REGISTER_OFFSETS
from dprobes.bpf.lower.lowering_request import Abilities, KeptEntry, Request
from dprobes.bpf.map_layouts import (
    CALL_WINDOW,
    PROBE_ENTRY_SIZE,
    REGISTERS,
    SLOTS_SHIFT,
    CallTable,
    MapName,
    ProbeField,
    call_key,
)
from dprobes.native.ebpf_translator import handler_function
from dprobes.native.generated_code import MapPlace, Surroundings
from dprobes.native.x86.x86_assembler import Gpr, Memory, X86Assembler
from dprobes.native.x86.x86_operations import X86Operations
from support.machine_code import call_stub, function_at, place, reserve

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.bpf.bpf_assembler import Assembled

ROOM = 4096
KEPT = KeptEntry((("edi", 5, None), ("esi", 4, None)))
TABLE = CallTable.of(2)
CONTEXT_SIZE = 168
SEEN = -168
FRAME = 0x7FFC_1234_5678
PROBE = 2


class World:
    """A table, a clock that is set, and the code at entries and returns of one function."""

    def __init__(self) -> None:
        self.table = mmap.mmap(-1, TABLE.size)
        self._probes = ctypes.create_string_buffer(PROBE_ENTRY_SIZE * 4)
        self._clock = ctypes.c_uint64(0)
        maps = {MapName.ENTRIES: MapPlace(self.address), MapName.PROBES: MapPlace(ctypes.addressof(self._probes))}
        clock = reserve(ROOM)
        asm = X86Assembler(clock)
        asm.mov_number(Gpr.R10, ctypes.addressof(self._clock))
        asm.load(Gpr.RAX, Memory(Gpr.R10, 0))
        asm.ret()
        place(clock, asm.assemble(), ROOM)
        self._around = Surroundings(maps, {Helper.KTIME_GET_NS: clock}, {})
        request = Request(probe=PROBE, entry=KEPT, abilities=Abilities(sleepable=False, calls=TABLE))
        self._enter = self._made(table_entry_program(architecture("x86_64"), request, Host).assembled)
        asm_taking = Assembler()
        asm_taking.mov(CONTEXT, Register.R1)
        take_from_table(asm_taking, request, SEEN)
        for word in range(3):
            asm_taking.load(Register.R0, Register.R10, SEEN - 8 * word)
            asm_taking.store(CONTEXT, 8 * word, Register.R0)
        asm_taking.exit()
        self._leave = self._made(asm_taking.assemble())

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.table))

    def _made(self, assembled: Assembled) -> Callable[..., int]:
        address = reserve(ROOM)
        code = handler_function(X86Operations(address), assembled, self._around)
        place(address, code.code + call_stub(code.end, address), ROOM)
        return function_at(code.end)

    def _context(self, frame: int, rdi: int = 0, rsi: int = 0) -> ctypes.Array[ctypes.c_char]:
        context = bytearray(CONTEXT_SIZE)
        for name, value in (("esp", frame), ("edi", rdi), ("esi", rsi)):
            struct.pack_into("<Q", context, REGISTER_OFFSETS[name], value)
        return ctypes.create_string_buffer(bytes(context), CONTEXT_SIZE)

    def enter(self, frame: int, time: int, rdi: int = 0, rsi: int = 0) -> None:
        self._clock.value = time
        self._enter(ctypes.addressof(self._context(frame, rdi, rsi)))

    def leave(self, frame: int) -> tuple[int, ...]:
        """Return the time, and the registers, of the call that returns."""
        context = self._context(frame)
        self._leave(ctypes.addressof(context))
        return struct.unpack_from("<3Q", context.raw)

    def disable(self) -> None:
        struct.pack_into("<I", self._probes, PROBE * PROBE_ENTRY_SIZE + ProbeField.DISABLED, 1)


@pytest.fixture
def world() -> World:
    return World()


def alike(count: int) -> list[int]:
    """Return so many frames whose calls have the same window."""
    wanted = TABLE.window(call_key(PROBE, FRAME)).start
    found: list[int] = []
    frame = FRAME
    while len(found) < count:
        if TABLE.window(call_key(PROBE, frame)).start == wanted:
            found.append(frame)
        frame -= 8
    return found


def test_a_return_has_the_entry_of_its_call(world: World) -> None:
    world.enter(FRAME, 100, 7, 8)
    world.enter(FRAME - 64, 200, 9, 10)
    assert world.leave(FRAME - 64) == (200, 9, 10)
    assert world.leave(FRAME) == (100, 7, 8)
    assert world.leave(FRAME)[0] == 0


def test_a_recursion_has_all_of_its_entries(world: World) -> None:
    depth = 1 << SLOTS_SHIFT - 2
    for n in range(depth):
        world.enter(FRAME - 48 * n, n + 1, n, n * 2)
    assert [world.leave(FRAME - 48 * n) for n in reversed(range(depth))] == [
        (n + 1, n, n * 2) for n in reversed(range(depth))
    ]


def test_what_was_left_without_a_return_is_replaced(world: World) -> None:
    world.enter(FRAME, 100, 1)
    world.enter(FRAME, 200, 2)
    assert world.leave(FRAME) == (200, 2, 0)
    assert world.leave(FRAME)[0] == 0


def test_of_too_many_in_one_window_the_oldest_is_forgotten(world: World) -> None:
    frames = alike(CALL_WINDOW + 1)
    for n, frame in enumerate(frames[:-1]):
        world.enter(frame, 1000 - n if n < 4 else 2000 + n, n)
    world.enter(frames[-1], 5000, 77)
    assert world.leave(frames[3])[0] == 0
    assert world.leave(frames[-1]) == (5000, 77, 0)
    assert [world.leave(frame)[0] for frame in frames[:3]] == [1000, 999, 998]


def test_a_slot_that_is_being_filled_is_not_taken_away(world: World) -> None:
    frames = alike(CALL_WINDOW + 1)
    for n, frame in enumerate(frames[:-1]):
        world.enter(frame, 1000 + n, n)
    window = TABLE.window(call_key(PROBE, frames[0]))
    struct.pack_into("<Q", world.table, window.start + 8, 0)  # the oldest one's time is to follow
    world.enter(frames[-1], 5000)
    assert struct.unpack_from("<QQ", world.table, window.start) == (call_key(PROBE, frames[0]), 0)
    assert struct.unpack_from("<QQ", world.table, window.start + TABLE.slot) == (call_key(PROBE, frames[-1]), 5000)


def test_registers_follow_the_time(world: World) -> None:
    world.enter(FRAME, 100, 7, 8)
    start = TABLE.window(call_key(PROBE, FRAME)).start
    assert struct.unpack_from("<QQQQ", world.table, start) == (call_key(PROBE, FRAME), 100, 7, 8)
    assert struct.unpack_from("<QQ", world.table, start + REGISTERS) == (7, 8)


def test_nothing_is_kept_for_a_probepoint_that_is_disabled(world: World) -> None:
    world.disable()
    world.enter(FRAME, 100)
    assert world.leave(FRAME)[0] == 0
