"""
Whatever a handler does, the probed function sees what it would see without: registers, flags, red zone, vectors.

A caller that is generated fills all of them at random, goes through the trampoline, and notes all of them again.
"""

from __future__ import annotations

import ctypes
import struct
from random import Random
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.bpf_assembler import Assembled, Assembler
from dprobes.bpf.bpf_instructions import Alu, Helper, Jump, Register, Size
from dprobes.bpf.lower.hosts.hit_thread import REGISTER_OFFSETS
from dprobes.bpf.map_layouts import INLINE_ENDING, MapName
from dprobes.native.generated_code import MapPlace, Part, ProcessFacts, Surroundings
from dprobes.native.handler_trampoline import make_trampoline
from dprobes.native.process_page import HAS_ENDED
from dprobes.native.routines.handler_ring import RingShape
from dprobes.native.runtime_routines import make_runtime
from dprobes.native.x86.x86_assembler import Gpr, Memory, X86Assembler
from dprobes.native.x86.x86_operations import FRAME_SIZE, SPARE_WORD, X86Operations, saved_at
from support.machine_code import SAVED, Pages, function_at, place, reserve

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from dprobes.native.handler_trampoline import Trial
    from dprobes.native.virtual_assembler import Label

R = Register
ROOM = 64 << 10
SITE = 0x1234_5678_9ABC

ORDER: list[Gpr] = [register for register in Gpr if register is not Gpr.RSP]
FLAGS = 8 * len(ORDER)
VECTORS = FLAGS + 8
RED_ZONE = VECTORS + 16 * 16
ABOVE = RED_ZONE + 128
SIZE = ABOVE + 128
"""A block: general registers, flags, vector registers, 128 bytes below the stack pointer, and 128 above it."""

STATUS_FLAGS = 0x8D5
"""CF, PF, AF, ZF, SF and OF (Intel SDM volume 1, section 3.4.3)."""
DIRECTION = 0x400

_STACK = 64 << 10
_BLOCK_IN, _BLOCK_OUT, _OWN_STACK = 0, 8, 16
"""Where the caller has its own pointers, in memory whose address is in its code."""

NAMES = {
    Gpr.RAX: "eax", Gpr.RCX: "ecx", Gpr.RDX: "edx", Gpr.RBX: "ebx", Gpr.RBP: "ebp", Gpr.RSI: "esi", Gpr.RDI: "edi",
    Gpr.R8: "r8", Gpr.R9: "r9", Gpr.R10: "r10", Gpr.R11: "r11", Gpr.R12: "r12", Gpr.R13: "r13", Gpr.R14: "r14",
    Gpr.R15: "r15",
}  # fmt: skip


def move_absolute(load: bool, address: int) -> bytes:
    """Return the move between rax and memory at any address (Intel SDM volume 2, MOV)."""
    return (b"\x48\xa1" if load else b"\x48\xa3") + address.to_bytes(8, "little")


def vector_moves(opcode: bytes, base: Gpr, start: int) -> bytes:
    """Return MOVUPS between all vector registers and memory at a base."""
    code = b""
    for number in range(16):
        rex = (4 if number & 8 else 0) | (1 if base & 8 else 0)
        code += (bytes((0x40 | rex,)) if rex else b"") + b"\x0f" + opcode
        code += bytes((0x80 | (number & 7) << 3 | base & 7,)) + struct.pack("<i", start + 16 * number)
    return code


class Caller:
    """A function that calls nothing, but falls into a trampoline and out of it, with all registers filled."""

    def __init__(
        self,
        handlers: Assembled | Sequence[Assembled],
        tables: dict[MapName, MapPlace],
        facts: ProcessFacts,
        trial: Trial[X86Operations] | None = None,
        marks: Sequence[int | None] = (None,),
        off: Collection[int] = (),
    ) -> None:
        """Have handlers, each with its mark of the end; the switches with these numbers are ``off``."""
        self.address = reserve(ROOM)
        self._pointers = (ctypes.c_uint64 * 3)()
        self._stack = ctypes.create_string_buffer(_STACK)
        self.middle = ctypes.addressof(self._stack) + _STACK // 2 & ~15
        runtime = make_runtime(X86Operations(self.address), facts, RingShape(2, 4096), {})
        around = Surroundings(
            tables, runtime.routines, runtime.map_routines, facts.has_rdpid, life_mark=facts.life_mark
        )
        alone = isinstance(handlers, Assembled)
        parts = (
            [Part(handlers, around)]
            if isinstance(handlers, Assembled)
            else [Part(each, around._replace(life_mark=mark)) for each, mark in zip(handlers, marks, strict=True)]
        )
        back: list[int] = []
        beyond = X86Operations(runtime.code.end)
        trampoline = make_trampoline(
            beyond, SITE, parts, lambda asm: back.append(asm.here), trial, has_switches=not alone
        )
        switched = bytearray(trampoline.code)
        self.switches = trampoline.switches
        for number in off:
            switch = trampoline.switches[number]
            at = switch.address - trampoline.address
            assert switched[at : at + 5] == switch.on
            switched[at : at + 5] = switch.off
        trampoline = trampoline._replace(code=bytes(switched))
        asm = X86Assembler(trampoline.end)
        code = runtime.code.code + trampoline.code
        after = self._note()
        asm.raw(after)
        entry = trampoline.end + len(after)
        before = self._fill(entry, trampoline.address)
        place(self.address, code + after + before, ROOM)
        self._function = function_at(entry)

    def _pointer(self, which: int) -> int:
        return ctypes.addressof(self._pointers) + which

    def _fill(self, address: int, trampoline: int) -> bytes:
        asm = X86Assembler(address)
        for register in SAVED:
            asm.push(register)
        asm.mov(Gpr.RAX, Gpr.RSP)
        asm.raw(move_absolute(False, self._pointer(_OWN_STACK)))
        asm.raw(move_absolute(True, self._pointer(_BLOCK_IN)))
        asm.mov(Gpr.RBX, Gpr.RAX)
        asm.mov_number(Gpr.RSP, self.middle)
        asm.load(Gpr.RCX, Memory(Gpr.RBX, FLAGS))
        asm.push(Gpr.RCX)
        asm.popfq()
        for start, at in ((RED_ZONE, -128), (ABOVE, 0)):
            for n in range(0, 128, 8):
                asm.load(Gpr.RAX, Memory(Gpr.RBX, start + n))
                asm.store(Memory(Gpr.RSP, at + n), Gpr.RAX)
        asm.raw(vector_moves(b"\x10", Gpr.RBX, VECTORS))
        for number, register in enumerate(ORDER):
            if register is not Gpr.RBX:
                asm.load(register, Memory(Gpr.RBX, 8 * number))
        asm.load(Gpr.RBX, Memory(Gpr.RBX, 8 * ORDER.index(Gpr.RBX)))
        asm.jump_to(trampoline)
        return asm.assemble()

    def _note(self) -> bytes:
        asm = X86Assembler()
        asm.lea(Gpr.RSP, Memory(Gpr.RSP, -256))
        asm.push(Gpr.RBX)
        asm.push(Gpr.RAX)
        asm.pushfq()
        asm.raw(move_absolute(True, self._pointer(_BLOCK_OUT)))
        asm.mov(Gpr.RBX, Gpr.RAX)
        for number, register in enumerate(ORDER):
            if register not in (Gpr.RAX, Gpr.RBX):
                asm.store(Memory(Gpr.RBX, 8 * number), register)
        for at, place_of in ((0, FLAGS), (8, 8 * ORDER.index(Gpr.RAX)), (16, 8 * ORDER.index(Gpr.RBX))):
            asm.load(Gpr.RAX, Memory(Gpr.RSP, at))
            asm.store(Memory(Gpr.RBX, place_of), Gpr.RAX)
        asm.lea(Gpr.RSP, Memory(Gpr.RSP, 256 + 24))
        for start, at in ((RED_ZONE, -128), (ABOVE, 0)):
            for n in range(0, 128, 8):
                asm.load(Gpr.RAX, Memory(Gpr.RSP, at + n))
                asm.store(Memory(Gpr.RBX, start + n), Gpr.RAX)
        asm.raw(vector_moves(b"\x11", Gpr.RBX, VECTORS))
        asm.raw(b"\xfc")  # cld
        asm.mov(Gpr.RCX, Gpr.RSP)
        asm.raw(move_absolute(True, self._pointer(_OWN_STACK)))
        asm.mov(Gpr.RSP, Gpr.RAX)
        asm.mov(Gpr.RAX, Gpr.RCX)
        for register in reversed(SAVED):
            asm.pop(register)
        asm.ret()
        return asm.assemble()

    def run(self, block: bytes) -> tuple[bytes, int]:
        """Return the block behind the trampoline, and the stack pointer."""
        before = ctypes.create_string_buffer(block, SIZE)
        after = ctypes.create_string_buffer(SIZE)
        self._pointers[0], self._pointers[1] = ctypes.addressof(before), ctypes.addressof(after)
        stack = self._function(0)
        return after.raw, stack


@pytest.fixture(scope="module")
def facts() -> ProcessFacts:
    pages = Pages(1)
    return ProcessFacts(pages.start, pages.start + 64, has_rdpid=False)


def random_block(random: Random) -> bytes:
    flags = random.getrandbits(12) & STATUS_FLAGS | 0x202 | random.choice((0, DIRECTION))
    return random.randbytes(FLAGS) + flags.to_bytes(8, "little") + random.randbytes(SIZE - VECTORS)


def shown(block: bytes, register: Gpr) -> int:
    at = 8 * ORDER.index(register)
    return int.from_bytes(block[at : at + 8], "little")


def check(caller: Caller, random: Random, changed: dict[int, int] | None = None) -> bytes:
    """Go through once; return the block. ``changed`` are words of it that are to be different, by their place."""
    block = random_block(random)
    after, stack = caller.run(block)
    expected = bytearray(block)
    for at, value in (changed or {}).items():
        expected[at : at + 8] = value.to_bytes(8, "little")
    assert stack == caller.middle
    if after != expected:
        names = [register.name for register in ORDER if shown(after, register) != shown(bytes(expected), register)]
        different = [n for n in range(FLAGS, SIZE) if after[n] != expected[n]]
        raise AssertionError(f"registers {names} and the bytes {different} are different")
    return block


def handler(write: Callable[[Assembler], None]) -> Assembled:
    asm = Assembler()
    asm.mov(R.R6, R.R1)
    write(asm)
    asm.mov(R.R0, 0)
    asm.exit()
    return asm.assemble()


def spoil(asm: Assembler, registers: list[Register]) -> None:
    """Let registers, and flags, be something else, and look at them, so that this is not left out."""
    for register in registers:
        asm.mov(register, 0xDEAD_0000 + register.value)
        asm.alu(Alu.SUB, register, 0x1234)
    for register in registers:
        out = asm.label()
        asm.jump_if(Jump.JEQ, register, 0x1234, out)
        asm.place(out)


def random_handler(random: Random) -> Assembled:
    """Return a handler that spoils some registers, uses so much of the frame, and calls this or that."""
    registers = [register for register in Register if register.value not in (6, 10) and random.random() < 0.4]
    depth = random.choice((0, 0, 8, 16, 24, 248, 512))
    helpers = [helper for helper in CALLED if random.random() < 0.25]
    names = [name for name in NAMES.values() if random.random() < 0.2]
    looks_at_flags = random.random() < 0.3

    def write(asm: Assembler) -> None:
        spoil(asm, registers)
        if depth:
            asm.store(R.R10, -depth, 0x77)
            asm.store(R.R10, -8, 0x77)
        for name in (*names, *(["eflags"] if looks_at_flags else [])):
            asm.load(R.R3, R.R6, REGISTER_OFFSETS[name])
            asm.store(R.R10, -8, R.R3)
        for helper in helpers:
            asm.call(helper)
        if helpers:
            spoil(asm, [R.R0, R.R1, R.R2, R.R3, R.R4, R.R5])
        if random.random() < 0.3:
            out = asm.label()
            asm.may_goto(out)
            asm.place(out)

    return handler(write)


CALLED = (Helper.KTIME_GET_NS, Helper.GET_CURRENT_PID_TGID, Helper.GET_SMP_PROCESSOR_ID)


@pytest.mark.parametrize("seed", range(60))
def test_a_handler_changes_nothing(facts: ProcessFacts, seed: int) -> None:
    random = Random(seed)
    caller = Caller(random_handler(random), {}, facts)
    for _ in range(30):
        check(caller, random)


class Spoiler:
    """A trial that changes what it may: rax, rdx, the flags, and the spare word of the frame."""

    changed = frozenset({Gpr.RDX})
    tries = True

    def __init__(self, *, has_endings: bool = False) -> None:
        self.has_endings = has_endings

    def write_endings(self, asm: X86Assembler, restore: Callable[[], None], rest: Label) -> None:
        restore()
        asm.lea(Gpr.RSP, Memory(Gpr.RSP, FRAME_SIZE))
        asm.jump(rest)

    def touch_stack(self, asm: X86Assembler) -> None:
        asm.store(Memory(Gpr.RSP, -700), Gpr.RAX)

    def write(self, asm: X86Assembler, *, keeps_flags: bool) -> None:
        asm.mov_number(Gpr.RAX, 0x1234_5678)
        asm.mov_number(Gpr.RDX, 0)
        asm.store(Memory(Gpr.RSP, SPARE_WORD), Gpr.RAX)
        asm.compare(Gpr.RDX, Gpr.RAX)
        asm.load(Gpr.RDX, saved_at(Gpr.RDX))


@pytest.mark.parametrize("seed", range(20))
def test_a_trial_changes_nothing(facts: ProcessFacts, seed: int) -> None:
    random = Random(seed)
    caller = Caller(random_handler(random), {}, facts, Spoiler())
    for _ in range(10):
        check(caller, random)


@pytest.mark.parametrize("ending", [0, 1])
def test_however_a_handler_ends_registers_are_restored(facts: ProcessFacts, ending: int) -> None:
    def write(asm: Assembler) -> None:
        spoil(asm, [R.R0, R.R2, R.R7])
        asm.store(R.R6, INLINE_ENDING, ending)

    random = Random(ending)
    caller = Caller(handler(write), {}, facts, Spoiler(has_endings=True))
    for _ in range(10):
        check(caller, random)


def test_each_register_alone(facts: ProcessFacts) -> None:
    random = Random(1)
    for register in Register:
        if register.value not in (6, 10):
            caller = Caller(handler(lambda asm, r=register: spoil(asm, [r])), {}, facts)  # type: ignore[misc]
            for _ in range(10):
                check(caller, random)


def test_all_flags_stay(facts: ProcessFacts) -> None:
    for looks in (False, True):

        def write(asm: Assembler, looks: bool = looks) -> None:
            spoil(asm, [R.R0])
            if looks:
                asm.load(R.R2, R.R6, REGISTER_OFFSETS["eflags"])
                asm.store(R.R10, -8, R.R2)

        caller = Caller(handler(write), {}, facts)
        for number in range(64):
            bits = [bit for bit in range(12) if STATUS_FLAGS >> bit & 1]
            flags = sum(1 << bit for n, bit in enumerate(bits) if number >> n & 1) | 0x202
            block = bytearray(random_block(Random(number)))
            block[FLAGS : FLAGS + 8] = flags.to_bytes(8, "little")
            after, _ = caller.run(bytes(block))
            assert int.from_bytes(after[FLAGS : FLAGS + 8], "little") == flags


def test_what_a_handler_sees(facts: ProcessFacts) -> None:
    """Each register of the hit alone, and all of them, the flags among them."""
    seen = ctypes.create_string_buffer(8 * 21)
    where = {MapName.LOCALS: MapPlace(ctypes.addressof(seen))}

    def looking(names: list[str]) -> Assembled:
        def write(asm: Assembler) -> None:
            for name in names:
                asm.load(R.R2, R.R6, REGISTER_OFFSETS[name])
                asm.load_value(R.R3, MapName.LOCALS, REGISTER_OFFSETS[name])
                asm.store(R.R3, 0, R.R2)

        return handler(write)

    random = Random(2)
    others = ["eip", "esp", "cs", "ss", "eflags"]
    for names in ([*NAMES.values(), *others], *([name] for name in (*NAMES.values(), *others))):
        caller = Caller(looking(names), where, facts)
        for _ in range(5):
            block = check(caller, random)
            known = {name: shown(block, register) for register, name in NAMES.items()}
            known |= {"eip": SITE, "esp": caller.middle, "cs": 0x33, "ss": 0x2B}
            known["eflags"] = int.from_bytes(block[FLAGS:VECTORS], "little")
            for name in names:
                at = REGISTER_OFFSETS[name]
                assert int.from_bytes(seen.raw[at : at + 8], "little") == known[name], name


@pytest.mark.parametrize("register", ORDER)
def test_a_register_that_a_handler_sets_is_set(facts: ProcessFacts, register: Gpr) -> None:
    value = 0x1122_3344_5566_7788

    def write(asm: Assembler) -> None:
        asm.mov(R.R2, value)
        asm.store(R.R6, REGISTER_OFFSETS[NAMES[register]], R.R2)

    caller = Caller(handler(write), {}, facts)
    for seed in range(10):
        check(caller, Random(seed), {8 * ORDER.index(register): value})


def test_a_part_of_a_register_may_be_set(facts: ProcessFacts) -> None:
    caller = Caller(handler(lambda asm: asm.store(R.R6, REGISTER_OFFSETS["r12"], 0x55, Size.B)), {}, facts)
    for seed in range(10):
        block = random_block(Random(seed))
        after, _ = caller.run(block)
        assert shown(after, Gpr.R12) == shown(block, Gpr.R12) & ~0xFF | 0x55


def test_flags_that_a_handler_sets_are_set(facts: ProcessFacts) -> None:
    def write(asm: Assembler) -> None:
        asm.load(R.R2, R.R6, REGISTER_OFFSETS["eflags"])
        asm.alu(Alu.XOR, R.R2, 0x41)
        asm.store(R.R6, REGISTER_OFFSETS["eflags"], R.R2)

    caller = Caller(handler(write), {}, facts)
    for seed in range(10):
        block = random_block(Random(seed))
        after, _ = caller.run(block)
        before = int.from_bytes(block[FLAGS:VECTORS], "little")
        assert int.from_bytes(after[FLAGS:VECTORS], "little") == before ^ 0x41


def test_a_handler_that_leaves_early_changes_nothing_either(facts: ProcessFacts) -> None:
    def write(asm: Assembler) -> None:
        out = asm.label()
        asm.load(R.R2, R.R6, REGISTER_OFFSETS["eax"])
        asm.alu(Alu.AND, R.R2, 1)
        asm.jump_if(Jump.JEQ, R.R2, 0, out)
        spoil(asm, [R.R0, R.R3, R.R7, R.R8, R.R9])
        asm.store(R.R10, -16, R.R3)
        asm.exit()
        asm.place(out)

    caller = Caller(handler(write), {}, facts)
    for seed in range(60):
        check(caller, Random(seed))


def test_nothing_far_below_the_stack_is_touched(facts: ProcessFacts) -> None:
    """A handler needs less than a kilobyte of stack, and the way to it less than another half."""
    random = Random(3)
    for seed in range(20):
        caller = Caller(random_handler(Random(seed)), {}, facts)
        low = caller.middle - 2048
        filled = bytes(2048 - 1536)
        ctypes.memmove(low, b"\xa5" * len(filled), len(filled))
        check(caller, random)
        assert ctypes.string_at(low, len(filled)) == b"\xa5" * len(filled)


def test_a_handler_does_nothing_once_the_tool_has_ended(facts: ProcessFacts) -> None:
    mark = ctypes.c_uint32(1234)
    with_mark = facts._replace(life_mark=ctypes.addressof(mark))
    random = Random(5)

    def write(asm: Assembler) -> None:
        asm.mov(R.R2, 77)
        asm.store(R.R6, REGISTER_OFFSETS["r15"], R.R2)  # nothing of the context is read
        spoil(asm, [R.R1, R.R7, R.R8, R.R9])

    caller = Caller(handler(write), {}, with_mark)
    for ended in (False, True, False, True):
        mark.value = 1 << 30 if ended else 1234
        changed = {} if ended else {8 * ORDER.index(Gpr.R15): 77}
        for _ in range(10):
            check(caller, random, changed)


@pytest.mark.parametrize("seed", range(10))
def test_the_mark_of_a_living_tool_changes_nothing_for_the_function(facts: ProcessFacts, seed: int) -> None:
    mark = ctypes.c_uint32(4_194_303)
    random = Random(seed)
    caller = Caller(random_handler(random), {}, facts._replace(life_mark=ctypes.addressof(mark)))
    for _ in range(10):
        check(caller, random)


def adding(place: MapName, number: int, register: str = "") -> Assembled:
    """Return a handler that adds to a word, and spoils a register of the program's if it is to."""

    def write(asm: Assembler) -> None:
        spoil(asm, [R.R0, R.R2, R.R7, R.R8])
        asm.load_value(R.R3, place)
        asm.load(R.R4, R.R3, 0)
        asm.alu(Alu.MUL, R.R4, 10)
        asm.alu(Alu.ADD, R.R4, number)
        asm.store(R.R3, 0, R.R4)
        if register:
            asm.load(R.R5, R.R6, REGISTER_OFFSETS[register])
            asm.store(R.R10, -8, R.R5)

    return handler(write)


@pytest.mark.parametrize("trial", [None, Spoiler()])
@pytest.mark.parametrize(
    ("off", "ended", "expected"),
    [((), (), 123), ((1,), (), 23), ((2,), (), 13), ((1, 3), (), 2), ((0,), (), 0), ((), (1,), 13), ((), (0, 1, 2), 0)],
)
def test_of_several_handlers_those_run_in_order_that_are_not_switched_off_and_have_somebody(
    facts: ProcessFacts, trial: Trial[X86Operations] | None, off: tuple[int, ...], ended: tuple[int, ...], expected: int
) -> None:
    cell, marks = ctypes.c_uint64(0), [ctypes.c_uint32(HAS_ENDED if number in ended else 0) for number in range(3)]
    where = {MapName.LOCALS: MapPlace(ctypes.addressof(cell))}
    handlers = [adding(MapName.LOCALS, number, name) for number, name in ((1, ""), (2, "r12"), (3, "eflags"))]
    places = [ctypes.addressof(mark) for mark in marks]
    if trial is not None:  # before it three more switches say for whom it is tried
        off = tuple(number if not number else number + 3 for number in off)
    caller = Caller(handlers, where, facts, trial, places, off)
    assert [switch.parts for switch in caller.switches[-3:]] == [(0,), (1,), (2,)]
    assert caller.switches[0].parts == (0, 1, 2)
    for seed in range(10):
        cell.value = 0
        check(caller, Random(seed))
        assert cell.value == expected
    for mark in marks:
        mark.value = 0
