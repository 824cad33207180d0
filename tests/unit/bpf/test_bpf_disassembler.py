"""Instructions as text: the notation, that of the kernel, and that no two instructions look alike."""

from __future__ import annotations

import ctypes
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.bpf_disassembler import disassemble
from dprobes.bpf.bpf_instructions import WIDE_LOAD, Alu, Atomic, Helper, Insn, Jump, Register, Size
from dprobes.bpf.lower import LoopForm
from dprobes.bpf.map_layouts import MapName, Status
from dprobes.engines.ebpf.kernel.bpf_objects import ArrayMap, loadable
from dprobes.platform.linux.bpf_calls import LogLevel, ProgramFlag, ProgramType, load_program
from support.ebpf_backend import obstacle
from unit.bpf.lower.test_verification import SHAPES, runner_of

KERNEL_LINE = re.compile(r"^(\d+): \([0-9a-f]{2}\) (.*?)(?:\s*;.*)?$", re.MULTILINE)
"""A line of the verifier's log: index, opcode, text, and what is known then."""

R0, R1, R2, R3, R7, R10 = (Register(n) for n in (0, 1, 2, 3, 7, 10))

SIGNED16 = st.integers(-(1 << 15), (1 << 15) - 1)
SIGNED32 = st.integers(-(1 << 31), (1 << 31) - 1)
INSNS = st.builds(
    Insn,
    st.integers(0, 255).filter(lambda opcode: opcode != WIDE_LOAD),
    st.integers(0, 15),
    st.integers(0, 15),
    st.sampled_from((0, 0, 1, -1)) | SIGNED16,
    st.sampled_from((0, 0, 1, 2, 0xE1, 0xF1, 0x40, 0x41)) | SIGNED32,
)


def text_of(*code: Insn) -> list[str]:
    return [line.text for line in disassemble(code)]


def test_a_program_is_listed_as_the_kernel_lists_it() -> None:
    asm = Assembler()
    again, done, function = asm.label(), asm.label(), asm.label()
    asm.load(R2, R1, 112)
    asm.jump_if(Jump.JSGT, R2, 0, done)
    asm.jump_if(Jump.JSET, R2, R1, done, wide=False)
    asm.place(again)
    asm.mov(R0, -5)
    asm.mov(R0, 0x8000_0000)
    asm.mov(R3, 0x1234_5678_9ABC_DEF0)
    asm.alu(Alu.ARSH, R0, 3)
    asm.alu(Alu.MOD, R0, R2, wide=False)
    asm.neg(R0)
    asm.store(R10, -8, R0, Size.W)
    asm.store(R7, 16, -1, Size.B)
    asm.load(R1, R7, 8192, Size.H)
    asm.load_map(R1, MapName.RING)
    asm.load_value(R1, MapName.STATUS, Status.ALIVE)
    asm.atomic(Atomic.ADD, R1, 0, R2)
    asm.atomic(Atomic.ADD, R1, 0, R2, fetch=True)
    asm.atomic(Atomic.OR, R1, 4, R2, size=Size.W, fetch=True)
    asm.atomic(Atomic.XCHG, R1, 0, R2)
    asm.atomic(Atomic.CMPXCHG, R1, 0, R2)
    asm.load_function(R2, function)
    asm.call(Helper.PROBE_READ_USER)
    asm.call(9999)
    asm.call_kfunc(4711)
    asm.may_goto(done)
    asm.jump(again)
    asm.place(done)
    asm.exit()
    asm.function(function)
    asm.exit()
    assembled = asm.assemble()
    maps = {reference.index: reference.map for reference in assembled.maps}
    assert [f"{line.index:2}: {line.text}" for line in disassemble(assembled.code, maps)] == [
        " 0: r2 = *(u64 *)(r1 + 112)",
        " 1: if r2 s> 0 goto +27 <29>",
        " 2: if w2 & w1 goto +26 <29>",
        " 3: r0 = -5",
        " 4: w0 = -2147483648",
        " 5: r3 = 0x123456789abcdef0 ll",
        " 7: r0 s>>= 3",
        " 8: w0 %= w2",
        " 9: r0 = -r0",
        "10: *(u32 *)(r10 - 8) = r0",
        "11: *(u8 *)(r7 + 16) = -1",
        "12: r1 = *(u16 *)(r7 + 8192)",
        "13: r1 = map[ring]",
        "15: r1 = map[status][0] + 8",
        "17: lock *(u64 *)(r1 + 0) += r2",
        "18: r2 = atomic64_fetch_add((u64 *)(r1 + 0), r2)",
        "19: r2 = atomic_fetch_or((u32 *)(r1 + 4), r2)",
        "20: r2 = atomic64_xchg((u64 *)(r1 + 0), r2)",
        "21: r0 = atomic64_cmpxchg((u64 *)(r1 + 0), r0, r2)",
        "22: r2 = function <30>",
        "24: call probe_read_user#112",
        "25: call helper#9999",
        "26: call kernel_function#4711",
        "27: may_goto +1 <29>",
        "28: goto -26 <3>",
        "29: exit",
        "30: exit",
    ]


@pytest.mark.parametrize(
    ("insn", "text"),
    [
        (Insn(0x85, 0, 1, 0, 6), "call pc+6 <7>"),
        (Insn(0x18, 1, 1, 0, 5), "unknown opcode 0x18, r1, r1, 0, 5"),  # its second slot is missing
        (Insn(0xFF, 1, 2, 3, 4), "unknown opcode 0xff, r1, r2, 3, 4"),
        (Insn(0x95, 1, 0, 0, 0), "unknown opcode 0x95, r1, r0, 0, 0"),  # no exit uses a register
        (Insn(0xC3, 1, 2, 0, 0x20), "unknown opcode 0xc3, r1, r2, 0, 32"),
        (Insn(0xCB, 1, 2, 0, 0), "unknown opcode 0xcb, r1, r2, 0, 0"),  # atomic on 2 bytes
    ],
)
def test_what_stands_alone(insn: Insn, text: str) -> None:
    assert text_of(insn) == [text]


def test_maps_without_a_name_are_descriptors() -> None:
    assert text_of(Insn(WIDE_LOAD, 1, 1, 0, 7), Insn(0)) == ["r1 = map[fd:7]"]
    assert text_of(Insn(WIDE_LOAD, 1, 2, 0, 7), Insn(0, imm=64)) == ["r1 = map[fd:7][0] + 64"]


@given(INSNS, INSNS)
def test_different_instructions_look_different(one: Insn, other: Insn) -> None:
    assert (text_of(one) == text_of(other)) == (one == other)


@given(INSNS, st.sampled_from(("opcode", "dst", "src", "off", "imm")), st.integers(1, 255))
def test_so_they_do_if_only_one_field_differs(insn: Insn, field: str, distance: int) -> None:
    limits = {"opcode": 256, "dst": 16, "src": 16}
    value = getattr(insn, field)
    changed = value ^ (distance & 1) if field in ("off", "imm") else (value + distance) % limits[field]
    other = insn._replace(**{field: changed})
    if other.opcode != WIDE_LOAD:
        assert (text_of(insn) == text_of(other)) == (insn == other)


@given(st.lists(INSNS | st.builds(Insn, st.just(WIDE_LOAD), imm=SIGNED32), max_size=20))
def test_every_slot_is_accounted_for(code: list[Insn]) -> None:
    following = 0
    for line in disassemble(code):
        assert line.index == following
        following += 2 if code[line.index].opcode == WIDE_LOAD and line.index + 1 < len(code) else 1
    assert following == len(code)


def as_the_kernel_has_it(text: str) -> str:
    """Return a line of ours with what the kernel writes in another way: distances, numbers, and names of helpers."""
    text = re.sub(r" <\d+>$", "", text)
    text = re.sub(r"goto ([+-]\d+)$", r"goto pc\1", text)
    text = re.sub(r"\(r(\d+) ([+-]) (\d+)\)", r"(r\1 \2\3)", text)
    text = re.sub(r"^(if .*) (-?\d+) goto", lambda m: f"{m[1]} {int(m[2]) & 0xFFFF_FFFF:#x} goto", text)
    return text.replace("call ", "call bpf_")


@pytest.mark.parametrize("shape", ["dense jumps", "heap", "loops in instructions", "traces"])
def test_the_kernel_lists_handlers_in_the_same_way(shape: str) -> None:
    if (reason := obstacle()) is not None:
        pytest.skip(reason)
    runner, start, point = runner_of(SHAPES[shape], "x86_64", LoopForm.MAY_GOTO)
    with runner:
        lowered = runner.compile(start, point)
        scratch = ArrayMap(lowered.state.size)
        maps = {each: map_.fd for each, map_ in runner._maps.items()} | {MapName.SCRATCH: scratch.fd}
        log = ctypes.create_string_buffer(1 << 24)
        with loadable(lowered.assembled, maps, ProgramType.SYSCALL, flags=ProgramFlag.SLEEPABLE) as program:
            os.close(load_program(program, log, LogLevel.LEVEL2))
        scratch.close()
    theirs = {int(index): text for index, text in KERNEL_LINE.findall(log.value.decode())}
    assert len(theirs) > len(lowered.assembled.code) // 2
    for line in disassemble(lowered.assembled.code):
        # The kernel shows addresses in the place of references to maps and functions.
        insn = lowered.assembled.code[line.index]
        if line.index in theirs and not (insn.is_map_reference or insn.is_function_reference):
            assert as_the_kernel_has_it(line.text) == theirs[line.index]
