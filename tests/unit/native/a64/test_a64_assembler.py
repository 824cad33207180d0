"""Each instruction is what the disassembler of another project (capstone) reads, at every register and size."""

from __future__ import annotations

import capstone
import pytest

from dprobes.errors import NotSupportedError
from dprobes.native.a64.a64_assembler import A64Assembler, Condition, Gpr, Memory, Operation, Shift, SystemRegister

HERE = 0x7F00_0000_1000
REGISTERS = [register for register in Gpr if register is not Gpr.SP]
NUMBERS = [0, 1, 0xFFFF, 0x10000, 0xFFFF_0000, 0x1234_5678, 0xFFFF_FFFF, 1 << 63, (1 << 64) - 1, (1 << 64) - 2,
           0xFFFF_FFFF_1234_FFFF, 0x1234_0000_0000_5678, 0x0123_4567_89AB_CDEF, 0xFFFF_8000_0000_0000]  # fmt: skip


def read(code: bytes) -> str:
    """Return the instructions in code."""
    found = list(capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM).disasm(code, HERE))
    assert 4 * len(found) == len(code), code.hex(" ")
    return "; ".join(f"{each.mnemonic} {each.op_str}".rstrip() for each in found)


def written(name: str, *arguments: object, **options: object) -> str:
    """Return what a method of the assembler writes."""
    asm = A64Assembler(HERE)
    getattr(asm, name)(*arguments, **options)
    return read(asm.assemble())


def name_of(register: Gpr, *, wide: bool = True) -> str:
    return f"{'x' if wide else 'w'}{register.value}"


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_loads_and_stores(size: int) -> None:
    letter = {1: "b", 2: "h"}.get(size, "")
    for register in REGISTERS:
        shown = name_of(register, wide=size == 8)
        for base in (Gpr.X0, Gpr.X25, Gpr.X30, Gpr.SP):
            at = "sp" if base is Gpr.SP else name_of(base)
            for displacement, form in ((0, f"[{at}]"), (4088, f"[{at}, #0xff8]")):
                assert written("load", register, Memory(base, displacement), size) == f"ldr{letter} {shown}, {form}"
                assert written("store", Memory(base, displacement), register, size) == f"str{letter} {shown}, {form}"
            assert written("load", register, Memory(base, -1), size) == f"ldur{letter} {shown}, [{at}, #-1]"
            assert written("store", Memory(base, -256), register, size) == f"stur{letter} {shown}, [{at}, #-0x100]"


def test_what_is_far_is_reached_by_a_register() -> None:
    assert written("load", Gpr.X1, Memory(Gpr.X2, -257)) == "mov x16, #-0x101; ldr x1, [x2, x16]"
    assert written("store", Memory(Gpr.X2, 0x8001), Gpr.X1, 4) == "mov x16, #0x8001; str w1, [x2, x16]"


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers(number: int) -> None:
    value = 0
    for text in written("mov_number", Gpr.X9, number).split("; "):
        mnemonic, _, rest = text.partition(" ")
        operands = rest.removeprefix("x9, ").split(", lsl #")
        part, shift = int(operands[0].removeprefix("#"), 0), int(operands[1]) if len(operands) > 1 else 0
        if mnemonic == "movk":
            value = value & ~(0xFFFF << shift) | part << shift
        else:
            assert mnemonic in ("mov", "movz", "movn")
            value = ~(part << shift) if mnemonic == "movn" else part << shift
    assert value & (1 << 64) - 1 == number


def test_numbers_take_few_instructions() -> None:
    assert len(written("mov_number", Gpr.X9, -1).split("; ")) == 1
    assert len(written("mov_number", Gpr.X9, 0x5555_0000).split("; ")) == 1
    assert len(written("mov_number", Gpr.X9, 0x7F12_3456_7000).split("; ")) == 3


@pytest.mark.parametrize("wide", [True, False])
def test_operations_on_registers(wide: bool) -> None:
    names = {Operation.ADD: "add", Operation.SUB: "sub", Operation.SUBS: "subs", Operation.AND: "and",
             Operation.ORR: "orr", Operation.EOR: "eor", Operation.ANDS: "ands", Operation.MUL: "mul",
             Operation.UDIV: "udiv", Operation.LSLV: "lsl", Operation.LSRV: "lsr", Operation.ASRV: "asr"}  # fmt: skip
    assert set(names) == set(Operation)
    for operation, name in names.items():
        for n, dst in enumerate(REGISTERS):
            src, operand = REGISTERS[n * 7 % 31], REGISTERS[n * 5 % 31]
            expected = ", ".join(name_of(each, wide=wide) for each in (dst, src, operand))
            assert written("calculate", operation, dst, src, operand, wide=wide) == f"{name} {expected}"


def test_operations_on_numbers() -> None:
    def calculated(operation: Operation, number: int) -> str:
        return written("calculate", operation, Gpr.X1, Gpr.X2, number)

    assert calculated(Operation.ADD, 0) == "add x1, x2, #0"
    assert calculated(Operation.ADD, 4095) == "add x1, x2, #0xfff"
    assert calculated(Operation.ADD, -8) == "sub x1, x2, #8"
    assert calculated(Operation.SUB, -8) == "add x1, x2, #8"
    assert calculated(Operation.SUB, 0x5000) == "sub x1, x2, #5, lsl #12"
    assert calculated(Operation.ADD, 0x5001) == "mov x16, #0x5001; add x1, x2, x16"
    assert calculated(Operation.AND, 7) == "mov x16, #7; and x1, x2, x16"
    assert calculated(Operation.SUBS, -1) == "mov x16, #-1; subs x1, x2, x16"
    assert written("calculate", Operation.SUB, Gpr.SP, Gpr.SP, 272) == "sub sp, sp, #0x110"
    assert written("calculate", Operation.ADD, Gpr.X25, Gpr.SP, 0) == "mov x25, sp"


def test_comparisons_and_their_branches() -> None:
    assert written("compare", Gpr.X3, Gpr.X4) == "cmp x3, x4"
    assert written("compare", Gpr.X3, 5, wide=False) == "cmp w3, #5"
    assert written("test", Gpr.X3, Gpr.X4, wide=False) == "tst w3, w4"
    for condition in Condition:
        asm = A64Assembler(HERE)
        label = asm.label()
        asm.jump_if(condition, label)
        asm.word(0xD503201F)
        asm.place(label)
        asm.jump(label)
        text = read(asm.assemble())
        assert text == f"b.{condition.name.lower()} #{HERE + 8:#x}; nop; b #{HERE + 8:#x}"


def test_a_branch_on_a_bit_leaves_flags_alone() -> None:
    asm = A64Assembler(HERE)
    label = asm.label()
    asm.jump_if_bit(Gpr.X16, 30, label)
    asm.place(label)
    assert read(asm.assemble()) == f"tbz w16, #0x1e, #{HERE + 8:#x}; b #{HERE + 8:#x}"
    assert not asm.changes_flags


@pytest.mark.parametrize("wide", [True, False])
def test_shifts_by_numbers(wide: bool) -> None:
    for shift in Shift:
        for count in range(1, 64 if wide else 32):
            text = written("shift", shift, Gpr.X5, Gpr.X6, count, wide=wide)
            expected = ", ".join(name_of(each, wide=wide) for each in (Gpr.X5, Gpr.X6))
            assert text == f"{shift.value} {expected}, #{count if count < 10 else hex(count)}"


def test_single_forms() -> None:
    assert written("mov", Gpr.X1, Gpr.X2) == "mov x1, x2"
    assert written("mov", Gpr.X1, Gpr.X2, wide=False) == "mov w1, w2"
    assert written("neg", Gpr.X1, Gpr.X2) == "neg x1, x2"
    assert written("multiply_subtract", Gpr.X1, Gpr.X2, Gpr.X3, Gpr.X4) == "msub x1, x2, x3, x4"
    assert written("multiply_high", Gpr.X1, Gpr.X2, Gpr.X3, is_signed=True) == "smulh x1, x2, x3"
    assert written("multiply_high", Gpr.X1, Gpr.X2, Gpr.X3, is_signed=False) == "umulh x1, x2, x3"
    assert written("extract", Gpr.X1, Gpr.X2, Gpr.X3, 32) == "extr x1, x2, x3, #0x20"
    assert written("load_acquire", Gpr.X1, Gpr.X2, 4) == "ldar w1, [x2]"
    assert written("store_release", Gpr.X2, Gpr.X1, 1) == "stlrb w1, [x2]"
    assert written("load_exclusive", Gpr.X1, Gpr.X2) == "ldaxr x1, [x2]"
    assert written("store_exclusive", Gpr.X3, Gpr.X2, Gpr.X1, 4) == "stlxr w3, w1, [x2]"
    assert written("barrier") == "dmb ish"
    assert written("jump_by", Gpr.X9) == "br x9"
    assert written("ret") == "ret"
    assert written("system_call") == "svc #0"
    assert written("synchronize") == "isb"
    assert written("jump_to", HERE - 0x1000) == f"b #{HERE - 0x1000:#x}"
    assert written("call_at", HERE + 0x7FF_FFFC) == f"bl #{HERE + 0x7FF_FFFC:#x}"
    for register in SystemRegister:
        assert written("read_system", Gpr.X1, register) == f"mrs x1, {register.name.lower()}"
    assert written("write_flags", Gpr.X1) == "msr nzcv, x1"


def test_what_changes_is_known() -> None:
    asm = A64Assembler()
    asm.calculate(Operation.ADD, Gpr.X1, Gpr.X2, Gpr.X3)
    asm.store(Memory(Gpr.X4, 0x12345), Gpr.X5)
    assert asm.changed == {Gpr.X1, Gpr.X16}
    assert not asm.changes_flags
    asm.compare(Gpr.X1, 1)
    assert asm.changes_flags


def test_a_branch_that_does_not_reach_its_target_is_refused() -> None:
    asm = A64Assembler()
    label = asm.label()
    asm.jump_if(Condition.EQ, label)
    for _ in range(1 << 18):
        asm.word(0)
    asm.place(label)
    with pytest.raises(NotSupportedError) as caught:
        asm.assemble()
    assert caught.value.message == "a branch of AArch64 does not reach +0x100004 bytes"
    with pytest.raises(NotSupportedError):
        A64Assembler().call_at(1 << 27)
