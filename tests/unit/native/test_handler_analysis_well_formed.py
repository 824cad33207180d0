"""What is no eBPF that we know is refused by name, and what is taken goes nowhere else."""

from __future__ import annotations

from random import Random

import pytest
from iced_x86 import Decoder, FlowControl

from dprobes.bpf.bpf_assembler import Assembled, Assembler, MapReference
from dprobes.bpf.bpf_instructions import Alu, Helper, Insn, Jump, Register, decode
from dprobes.bpf.map_layouts import MapName
from dprobes.errors import NotSupportedError
from dprobes.native.ebpf_translator import handler_function
from dprobes.native.generated_code import MapPlace, NativeCode, Surroundings
from dprobes.native.handler_analysis import check_code
from dprobes.native.x86.x86_operations import X86Operations

HERE, ROUTINE = 0x5000_0000, 0x4000_0000
AROUND = Surroundings(
    {name: MapPlace(0x6000_0000, stride=64) for name in MapName},
    dict.fromkeys(Helper, ROUTINE),
    {},
)
EXIT = Insn(0x95)
OPCODES = [opcode for opcode in range(256) if opcode != 0x18]


def assembled(*code: Insn, maps: tuple[MapReference, ...] = (), functions: tuple[int, ...] = (0,)) -> Assembled:
    return Assembled(code, maps, (-1,) * len(code), functions)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ([Insn(0x06), EXIT], "there is no machine code for the eBPF opcode 0x06"),
        ([Insn(0xE7), EXIT], "there is no machine code for the eBPF opcode 0xe7"),
        ([Insn(0xDC, imm=16), EXIT], "there is no machine code for the eBPF opcode 0xdc"),
        ([Insn(0x8F), EXIT], "there is no machine code for the eBPF opcode 0x8f"),
        ([Insn(0x20), EXIT], "there is no machine code for the eBPF opcode 0x20"),
        ([Insn(0x81, 1, 10, -8), EXIT], "there is no machine code for the eBPF opcode 0x81 with the offset -8"),
        ([Insn(0x42, 10, 0, -8), EXIT], "there is no machine code for the eBPF opcode 0x42 with the offset -8"),
        ([Insn(0xBF, 1, 2, 8), EXIT], "there is no machine code for the eBPF opcode 0xbf with the offset 8"),
        ([Insn(0x3F, 1, 2, 1), EXIT], "there is no machine code for the eBPF opcode 0x3f with the offset 1"),
        ([Insn(0x06, imm=1), EXIT], "there is no machine code for the eBPF opcode 0x06"),
        ([Insn(0xF5), EXIT], "there is no machine code for the eBPF opcode 0xf5"),
        ([Insn(0x0D), EXIT], "there is no machine code for the eBPF opcode 0x0d"),
        ([Insn(0x96), EXIT], "there is no machine code for the eBPF opcode 0x96"),
        ([Insn(0xD3, 10, 1, -8, 0), EXIT], "there is no machine code for the eBPF opcode 0xd3 with the offset -8"),
        ([Insn(0xDB, 10, 1, -8, 0x10), EXIT], "there is no machine code for the atomic operation 0x10"),
        ([Insn(0xDB, 10, 1, -8, 0xE0), EXIT], "there is no machine code for the atomic operation 0xe0"),
        ([Insn(0x18, 1, 4), Insn(0), EXIT], "there is no machine code for the address of a function"),
        ([Insn(0x18, 1, 6), Insn(0), EXIT], "there is no machine code for the address of a function"),
        ([Insn(0x18, 1)], "a load of 64 bits lacks its second half"),
        ([Insn(0x18, 1), EXIT], "a load of 64 bits lacks its second half"),
        ([Insn(0x85, 0, 2, imm=7), EXIT], "there is no machine code for calls of kernel functions"),
        ([Insn(0x85, 0, 1, imm=7), EXIT], "there is no machine code for calls of kernel functions"),
        ([Insn(0x85, imm=9999), EXIT], "there is no routine for helper 9999 of the kernel"),
        ([Insn(0x05, off=5), EXIT], "the eBPF instruction 0 goes to 6, where none begins"),
        ([Insn(0x05, off=1), EXIT], "the eBPF instruction 0 goes to 2, where none begins"),
        ([Insn(0x05, off=-2), EXIT], "the eBPF instruction 0 goes to -1, where none begins"),
        ([Insn(0x15, off=1), Insn(0x18), Insn(0), EXIT], "the eBPF instruction 0 goes to 2, where none begins"),
        ([Insn(0xE5, off=9), EXIT], "the eBPF instruction 0 goes to 10, where none begins"),
        ([], "the eBPF code runs off its end"),
        ([Insn(0xB7)], "the eBPF code runs off its end"),
        ([Insn(0x15)], "the eBPF instruction 0 goes to 1, where none begins"),
        ([Insn(0xB7, 11), EXIT], "there is no eBPF register 11"),
        ([Insn(0xBF, 1, 15), EXIT], "there is no eBPF register 15"),
        ([Insn(0xB7, 10), EXIT], "eBPF code may not change R10"),
        ([Insn(0x79, 10, 1), EXIT], "eBPF code may not change R10"),
        ([Insn(0x18, 10), Insn(0), EXIT], "eBPF code may not change R10"),
        ([Insn(0xDB, 1, 10, 0, 0xE1), EXIT], "eBPF code may not change R10"),
        ([Insn(0x79, 1, 10, 0), EXIT], "eBPF code has no frame at R10+0"),
        ([Insn(0x79, 1, 10, -4), EXIT], "eBPF code has no frame at R10-4"),
        ([Insn(0x7A, 10, 0, -520), EXIT], "eBPF code has no frame at R10-520"),
        ([Insn(0x7B, 10, 1, 8), EXIT], "eBPF code has no frame at R10+8"),
        ([Insn(0xBF, 1, 10), Insn(0x07, 1, imm=-0x7000_0000), EXIT], "eBPF code has no frame at R10-1879048192"),
        ([Insn(0xBF, 1, 10), Insn(0x07, 1, imm=16), EXIT], "eBPF code has no frame at R10+16"),
    ],
)
def test_what_is_not_known_is_refused(code: list[Insn], message: str) -> None:
    with pytest.raises(NotSupportedError) as refused:
        handler_function(X86Operations(HERE), assembled(*code), AROUND)
    assert str(refused.value) == message


def test_functions_of_a_handler_are_refused() -> None:
    with pytest.raises(NotSupportedError, match=r"^a handler with functions of its own cannot be translated"):
        check_code(assembled(EXIT, EXIT, functions=(0, 1)))


def test_a_helper_without_a_routine_is_refused() -> None:
    with pytest.raises(NotSupportedError, match=r"^there is no routine for what the kernel has as bpf_ktime_get_ns$"):
        handler_function(
            X86Operations(HERE), assembled(Insn(0x85, imm=Helper.KTIME_GET_NS), EXIT), Surroundings({}, {}, {})
        )


def test_a_map_that_is_nowhere_is_refused() -> None:
    asm = Assembler()
    asm.load_value(Register.R1, MapName.LOCALS)
    asm.store(Register.R1, 0, 1)
    asm.exit()
    with pytest.raises(NotSupportedError) as refused:
        handler_function(X86Operations(HERE), asm.assemble(), Surroundings({}, {}, {}))
    assert str(refused.value) == "the memory that handlers share with the tool has no map 'locals'"


def check_ways(native: NativeCode) -> None:
    """Check that all instructions are known, and that control stays in the code, but for calls of the routine."""
    starts, targets = set(), set()
    decoder = Decoder(64, native.code, ip=native.address)
    for insn in decoder:
        assert not insn.is_invalid
        starts.add(insn.ip)
        assert insn.flow_control is not FlowControl.INDIRECT_BRANCH
        if insn.flow_control in (FlowControl.UNCONDITIONAL_BRANCH, FlowControl.CONDITIONAL_BRANCH):
            targets.add(insn.near_branch_target)
        elif insn.flow_control == FlowControl.CALL:
            assert insn.near_branch_target == ROUTINE
    assert decoder.position == len(native.code)
    assert targets <= starts
    assert native.code[-1] == 0xC3


def is_taken(code: tuple[Insn, ...], maps: tuple[MapReference, ...] = ()) -> bool:
    try:
        native = handler_function(X86Operations(HERE), assembled(*code, maps=maps), AROUND)
    except NotSupportedError:
        return False
    check_ways(native)
    return True


def test_random_bytes_are_refused_or_go_nowhere_else() -> None:
    random = Random(16)
    taken = 0
    for _ in range(3000):
        code = [*decode(random.randbytes(8 * random.randrange(1, 4))), EXIT]
        taken += is_taken(tuple(code))
    assert taken < 100


def random_insn(random: Random) -> Insn:
    """Return an instruction whose fields are likely to mean something."""
    return Insn(
        random.choice(OPCODES),
        random.choice((*range(11), 11)),
        random.choice((0, 0, 1, 6, 10)),
        random.choice((0, 0, 0, -8, -16, 1, 2)),
        random.choice((0, 1, 5, 0xE1, 0xF1, -1, -8)),
    )


def test_so_are_instructions_that_are_nearly_right() -> None:
    random = Random(17)
    taken = sum(is_taken((*(random_insn(random) for _ in range(random.randrange(3))), EXIT)) for _ in range(10_000))
    assert 1000 < taken < 9000


def real_handler() -> Assembled:
    asm = Assembler()
    out = asm.label()
    asm.mov(Register.R6, Register.R1)
    asm.load_value(Register.R1, MapName.LOCALS)
    asm.load(Register.R2, Register.R6, 112)
    asm.jump_if(Jump.JGT, Register.R2, 5, out)
    asm.store(Register.R10, -8, Register.R2)
    asm.mov(Register.R2, Register.R10)
    asm.alu(Alu.ADD, Register.R2, -8)
    asm.load_map(Register.R1, MapName.SCRATCH)
    asm.call(Helper.MAP_LOOKUP_ELEM)
    asm.may_goto(out)
    asm.place(out)
    asm.mov(Register.R0, 0)
    asm.exit()
    return asm.assemble()


def test_so_is_a_handler_in_which_something_has_been_changed() -> None:
    random, good = Random(18), real_handler()
    assert is_taken(good.code, good.maps)
    taken = 0
    for _ in range(5000):
        code = list(good.code)
        at = random.randrange(len(code))
        field = random.choice(Insn._fields)
        size = {"opcode": 256, "dst": 16, "src": 16, "off": 1 << 16, "imm": 1 << 32}[field]
        value = random.randrange(size) if random.random() < 0.5 else random.randrange(16)
        if field in ("off", "imm"):
            value -= size // 2 if value >= size // 2 else 0
        code[at] = code[at]._replace(**{field: value})
        taken += is_taken(tuple(code), good.maps)
    assert 1000 < taken < 4500
