"""Each instruction is what the disassembler of another project reads, at every register and size."""

from __future__ import annotations

import pytest
from iced_x86 import Decoder, Formatter, FormatterSyntax

from dprobes.native.x86.x86_assembler import Condition, Gpr, Memory, Operation, Shift, X86Assembler

HERE = 0x7F00_0000_1000
_FIRST = ("ax", "cx", "dx", "bx", "sp", "bp", "si", "di")
NAMES = {
    8: [*("r" + name for name in _FIRST), *(f"r{n}" for n in range(8, 16))],
    4: [*("e" + name for name in _FIRST), *(f"r{n}d" for n in range(8, 16))],
    2: [*_FIRST, *(f"r{n}w" for n in range(8, 16))],
    1: ["al", "cl", "dl", "bl", "spl", "bpl", "sil", "dil", *(f"r{n}b" for n in range(8, 16))],
}
WORDS = {8: "qword", 4: "dword", 2: "word", 1: "byte"}


def read(code: bytes) -> str:
    """Return the instructions in code, as iced-x86 writes them for Intel."""
    formatter = Formatter(FormatterSyntax.INTEL)
    formatter.hex_prefix, formatter.hex_suffix = "0x", ""
    formatter.uppercase_hex = False
    formatter.small_hex_numbers_in_decimal = True
    instructions = list(Decoder(64, code, ip=HERE))
    assert all(not instruction.is_invalid for instruction in instructions), code.hex(" ")
    assert sum(instruction.len for instruction in instructions) == len(code)
    return "; ".join(formatter.format(instruction) for instruction in instructions)


def written(name: str, *arguments: object, **options: bool) -> str:
    """Return what a method of the assembler writes."""
    asm = X86Assembler(HERE)
    getattr(asm, name)(*arguments, **options)
    return read(asm.assemble())


def memory_text(base: Gpr, displacement: int, size: int) -> str:
    at = f"{displacement:+#x}" if abs(displacement) > 9 else f"{displacement:+d}" if displacement else ""
    return f"{WORDS[size]} ptr [{NAMES[8][base]}{at}]"


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("displacement", [0, 8, -128, 127, 128, -0x12345])
def test_loads_and_stores(size: int, displacement: int) -> None:
    for base in Gpr:
        for register in Gpr:
            place = memory_text(base, displacement, size)
            memory = Memory(base, displacement)
            stored = written("store", memory, register, size)
            assert stored == f"mov {place.partition(' ptr ')[2]},{NAMES[size][register]}"
            loaded = written("load", register, memory, size)
            if size < 4:
                assert loaded == f"movzx {NAMES[4][register]},{place}"
            else:
                assert loaded == f"mov {NAMES[size][register]},{place.partition(' ptr ')[2]}"


@pytest.mark.parametrize("operation", list(Operation))
def test_calculations(operation: Operation) -> None:
    name = operation.name.lower()
    for dst in Gpr:
        for src in Gpr:
            found = written("calculate", operation, dst, src)
            assert found == f"{name} {NAMES[8][dst]},{NAMES[8][src]}"
            found = written("calculate", operation, dst, src, wide=False)
            assert found == f"{name} {NAMES[4][dst]},{NAMES[4][src]}"
        for number in (5, -3, 0x1234, -0x7000_0000):
            found = written("calculate", operation, dst, number)
            shown = number & (1 << 64) - 1
            assert found == f"{name} {NAMES[8][dst]},{shown if shown < 10 else hex(shown)}"


@pytest.mark.parametrize(
    "number", [0, 1, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF, 1 << 32, -1, -(1 << 31), -(1 << 31) - 1, (1 << 64) - 1]
)
def test_numbers(number: int) -> None:
    for register in Gpr:
        found = written("mov_number", register, number)
        operation, _, operands = found.partition(" ")
        name, _, value = operands.partition(",")
        if not number:
            assert (operation, name, value) == ("xor", NAMES[4][register], NAMES[4][register])
        else:
            assert operation == "mov"
            assert name in (NAMES[4][register], NAMES[8][register])
            shown = int(value, 0)
            assert shown == number & (1 << 64) - 1


def test_shifts_and_the_rest() -> None:
    for register in Gpr:
        wide = NAMES[8][register]
        for shift in Shift:
            assert written("shift", shift, register, 13) == f"{shift.name.lower()} {wide},0xd"
            assert written("shift_by_cl", shift, register) == f"{shift.name.lower()} {wide},cl"
        assert written("neg", register) == f"neg {wide}"
        assert written("div", register) == f"div {wide}"
        assert written("multiply_wide", register) == f"imul {wide}"
        assert written("multiply", register, Gpr.R9) == f"imul {wide},r9"
        assert written("multiply", register, 0x1234) == f"imul {wide},0x1234"
        assert written("push", register) == f"push {wide}"
        assert written("pop", register) == f"pop {wide}"
        assert written("rdpid", register) == f"rdpid {wide}"
        assert written("jump_by", register) == f"jmp {wide}"
        assert written("lea", register, Memory(Gpr.R12, -8)) == f"lea {wide},[r12-8]"
        assert written("shrd", register, Gpr.RDX, 32) == f"shrd {wide},rdx,0x20"
    assert written("load", Gpr.RAX, Memory(None, 0x2D0, of_thread=True), 4) == "mov eax,fs:[0x2d0]"


def test_what_others_change_too() -> None:
    memory = Memory(Gpr.R13, 16)
    for register in Gpr:
        for size, names in ((4, NAMES[4]), (8, NAMES[8])):
            name = names[register]
            found = written("exchange_add", memory, register, size)
            assert found == f"lock xadd [r13+0x10],{name}"
            found = written("exchange", memory, register, size)
            assert found == f"xchg [r13+0x10],{name}"
            found = written("compare_exchange", memory, register, size)
            assert found == f"lock cmpxchg [r13+0x10],{name}"
            found = written("calculate_in", Operation.ADD, memory, register, size, lock=True)
            assert found == f"lock add [r13+0x10],{name}"


def test_labels_and_addresses() -> None:
    asm = X86Assembler(HERE)
    ahead, back = asm.label(), asm.label()
    asm.place(back)
    asm.jump_if(Condition.LE, ahead)
    asm.call(back)
    asm.jump(ahead)
    asm.place(ahead)
    asm.call_at(HERE - 0x1000)
    asm.jump_to(HERE + 0x1000)
    assert asm.address_of(ahead) == HERE + 16
    assert read(asm.assemble()) == (
        "jle 0x00007f0000001010; call 0x00007f0000001000; jmp 0x00007f0000001010; "
        "call 0x00007f0000000000; jmp 0x00007f0000002000"
    )


@pytest.mark.parametrize("method", ["call_at", "jump_to"])
@pytest.mark.parametrize("target", [0x1000 + (1 << 32), 0x1000 - (1 << 32)])
def test_what_is_too_far_away_is_said(method: str, target: int) -> None:
    with pytest.raises(OverflowError):
        getattr(X86Assembler(0x1000), method)(target)
