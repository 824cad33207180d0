"""Whatever a handler does, the probed function sees what it would see without: registers and flags."""

from __future__ import annotations

import struct
from random import Random
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.bpf_instructions import Alu, Atomic, Helper, Jump, Register, Size
from dprobes.bpf.map_layouts import MapName
from dprobes.native.a64.a64_operations import A64Operations
from dprobes.native.generated_code import MapPlace, MapShape, Part, ProcessFacts, Surroundings
from dprobes.native.handler_trampoline import make_trampoline
from dprobes.native.process_page import HAS_ENDED
from dprobes.native.routines.handler_ring import ENTRY_HEADER, PRODUCER, RingShape
from dprobes.native.runtime_routines import make_runtime
from support.a64_processor import PAGE, A64Processor

if TYPE_CHECKING:
    from collections.abc import Callable

R = Register
PC, PSTATE, SP = A64Operations.layout.ip, A64Operations.layout.flags, A64Operations.layout.sp
CODE, DATA, STACK, SITE = 0x40_0000, 0x50_0000, 0x60_0000, 0x12_3456_789C
VALUES, RINGS, PAGES = DATA, DATA + PAGE, DATA
RING = RingShape(2, PAGE)
MIDDLE = STACK + 8 * PAGE
MAPS = {
    MapName.SCRATCH: MapPlace(VALUES, MapShape.VALUES, 64),
    MapName.RING: MapPlace(RINGS, MapShape.RINGS),
}


def nothing(asm: Assembler) -> None:
    asm.mov(R.R0, 0)


def count(asm: Assembler) -> None:
    asm.load_value(R.R1, MapName.SCRATCH)
    asm.mov(R.R2, 1)
    asm.atomic(Atomic.ADD, R.R1, 0, R.R2)


def compare(asm: Assembler) -> None:
    out = asm.label()
    asm.load(R.R2, R.R1, 0)
    asm.jump_if(Jump.JGT, R.R2, 5, out)
    asm.mov(R.R3, 7)
    asm.place(out)


def frame(asm: Assembler) -> None:
    asm.mov(R.R6, R.R1)
    asm.load(R.R7, R.R6, 8 * 25)
    asm.store(R.R10, -8, R.R7)
    asm.load(R.R8, R.R10, -8)
    asm.load_value(R.R9, MapName.SCRATCH)
    asm.store(R.R9, 8, R.R8)


def look(asm: Assembler) -> None:
    asm.load_value(R.R9, MapName.SCRATCH)
    for place, word in enumerate((PC, SP, PSTATE, 8 * 16, 8 * 17, 8 * 30)):
        asm.load(R.R2, R.R1, word)
        asm.store(R.R9, 8 * place, R.R2)


def output(asm: Assembler) -> None:
    for place in range(5):
        asm.load(R.R2, R.R1, 8 * place)
        asm.store(R.R10, -40 + 8 * place, R.R2)
    asm.load_map(R.R1, MapName.RING)
    asm.mov(R.R2, R.R10)
    asm.alu(Alu.ADD, R.R2, -40)
    asm.mov(R.R3, 40)
    asm.alu(Alu.ADD, R.R3, R.R4)  # a length that is not known: by the routine
    asm.alu(Alu.SUB, R.R3, R.R4)
    asm.mov(R.R4, 0)
    asm.call(Helper.RINGBUF_OUTPUT)


def time_and_ids(asm: Assembler) -> None:
    asm.call(Helper.KTIME_GET_NS)
    asm.mov(R.R6, R.R0)
    asm.call(Helper.GET_CURRENT_PID_TGID)
    asm.alu(Alu.ADD, R.R6, R.R0)
    asm.load_value(R.R1, MapName.SCRATCH)
    asm.store(R.R1, 16, R.R6)


HANDLERS = [nothing, count, compare, frame, look, output, time_and_ids]


class Site:
    """A probed instruction, and the processor that comes to it."""

    def __init__(self, write: Callable[[Assembler], None], life_mark: int | None = None) -> None:
        asm = Assembler()
        write(asm)
        asm.mov(R.R0, 0)
        asm.exit()
        runtime = make_runtime(A64Operations(CODE), ProcessFacts(PAGES + 512, PAGES + 1024, 0, cpu_place=8), RING, {})
        around = Surroundings(MAPS, runtime.routines, runtime.map_routines, cpu_place=8, life_mark=life_mark)
        made = make_trampoline(
            A64Operations(runtime.code.end), SITE, [Part(asm.assemble(), around)], lambda asm: asm.word(0xD503201F)
        )
        self.start, self.end = made.address, made.end - 4
        self.processor = A64Processor([])
        self.processor.put(CODE, runtime.code.code + made.code)
        self.processor.map(DATA, 16 * PAGE)
        self.processor.map(STACK, 16 * PAGE)
        self.processor.thread_pointer = STACK

    def hit(self, registers: list[int], flags: int) -> tuple[list[int], int]:
        """Come to the instruction; return the registers and the flags behind it."""
        self.processor.set_registers(dict(enumerate(registers)))
        self.processor.flags = flags
        self.processor.run(self.start, self.end)
        return self.processor.registers(), self.processor.flags

    def words(self, address: int, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}Q", self.processor.read(address, 8 * count))


def random_registers(random: Random) -> list[int]:
    return [random.getrandbits(64) for _ in range(31)] + [MIDDLE - 16 * random.randrange(64)]


@pytest.mark.parametrize("write", HANDLERS)
def test_nothing_is_changed(write: Callable[[Assembler], None]) -> None:
    site, random = Site(write), Random(5)
    for _ in range(20):
        registers, flags = random_registers(random), random.getrandbits(4) << 28
        above = random.randbytes(256)
        site.processor.write(registers[31], above)
        assert site.hit(registers, flags) == (registers, flags)
        assert site.processor.read(registers[31], 256) == above


def test_hits_are_counted() -> None:
    site = Site(count)
    for _ in range(7):
        site.hit(random_registers(Random(1)), 0)
    assert site.words(VALUES, 1) == (7,)


def test_a_handler_does_nothing_once_the_tool_has_ended() -> None:
    def write(asm: Assembler) -> None:
        count(asm)
        asm.load(R.R3, R.R1, 0)

    def change(asm: Assembler) -> None:
        asm.mov(R.R2, 1)
        asm.store(R.R1, 8 * 5, R.R2)

    registers = random_registers(Random(2))
    for each, mark, expected in ((write, 4711, 1), (write, HAS_ENDED | 4711, 0), (change, HAS_ENDED, 0)):
        site = Site(each, life_mark=VALUES + 128)
        site.processor.write(VALUES + 128, struct.pack("<I", mark))
        assert site.hit(registers, 0x5000_0000) == (registers, 0x5000_0000)
        assert site.words(VALUES, 1) == (expected,)


def test_a_handler_sees_the_registers_of_the_hit() -> None:
    site, random = Site(look), Random(8)
    registers = random_registers(random)
    site.hit(registers, 0x9000_0000)
    assert site.words(VALUES, 6) == (SITE, registers[31], 0x9000_0000, registers[16], registers[17], registers[30])
    site = Site(frame)
    site.hit(registers, 0)
    assert site.words(VALUES + 8, 1) == (registers[25],)


def test_a_handler_changes_registers_and_flags() -> None:
    def write(asm: Assembler) -> None:
        asm.mov(R.R2, 0x1234)
        asm.store(R.R1, 8 * 16, R.R2)
        asm.store(R.R1, 8 * 3, R.R2, Size.W)
        asm.mov(R.R2, 0x6000_0000)
        asm.store(R.R1, PSTATE, R.R2)

    site, registers = Site(write), random_registers(Random(9))
    after, flags = site.hit(registers, 0x8000_0000)
    expected = list(registers)
    expected[16], expected[3] = 0x1234, registers[3] >> 32 << 32 | 0x1234
    assert (after, flags) == (expected, 0x6000_0000)


def test_a_record_comes_into_the_ring_of_the_cpu() -> None:
    site, registers = Site(output), random_registers(Random(10))
    site.processor.write(STACK + 8, struct.pack("<I", 1))  # the number of the CPU
    site.hit(registers, 0)
    ring = RINGS + RING.stride
    assert site.words(ring + PRODUCER, 1) == (ENTRY_HEADER + 40,)
    assert site.words(ring + PAGE, 6) == (40, *registers[:5])
    assert site.words(RINGS + PRODUCER, 1) == (0,)
