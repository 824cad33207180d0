"""What is executed from a trampoline instead of an instruction, form by form, and where each piece of it comes from."""

from __future__ import annotations

import pytest
from iced_x86 import Decoder, Formatter, FormatterSyntax

from dprobes.platform.x86.instruction_relocation import CodeCopy
from dprobes.platform.x86.patches.displaced_code import displaced, jump

ORIGINAL, COPY = 0x7F00_0000_1000, 0x7F00_0010_0000

POP, HIGH, BELOW = "pop qword ptr [rsp-0x10]", "mov dword ptr [rsp+4], 0x7f00", "jmp qword ptr [rsp-8]"

# The original, its copy without the jump back, and whether control comes back.
FORMS = [
    ("31c0", "xor eax, eax", True),
    ("488b0510000000", "mov rax, [0x7f0000001017]", True),
    ("c7051000000001000000", "mov dword ptr [0x7f000000101a], 1", True),
    ("67488b0510000000", "mov rax, [0x1018]", True),
    ("c5fc580510000000", "vaddps ymm0, ymm0, [0x7f0000001018]", True),
    ("f3aa", "rep stosb [rdi]", True),
    ("e800100000", f"push 0x1005; {HIGH}; jmp 0x7f0000002005", False),
    ("f2e800100000", f"push 0x1006; {HIGH}; jmp 0x7f0000002006", False),
    ("ffd0", f"push 0x1002; {HIGH}; jmp rax", False),
    ("41ffd4", f"push 0x1003; {HIGH}; jmp r12", False),
    ("3effd0", f"push 0x1003; {HIGH}; notrack jmp rax", False),
    ("ffd4", f"push rsp; {POP}; push 0x1002; {HIGH}; {BELOW}", False),
    ("ff10", f"push qword ptr [rax]; {POP}; push 0x1002; {HIGH}; {BELOW}", False),
    ("ff1510000000", f"push qword ptr [0x7f0000001016]; {POP}; push 0x1006; {HIGH}; {BELOW}", False),
    ("ff542408", f"push qword ptr [rsp+8]; {POP}; push 0x1004; {HIGH}; {BELOW}", False),
    ("64ff142510000000", f"push qword ptr fs:[0x10]; {POP}; push 0x1008; {HIGH}; {BELOW}", False),
    ("41ff5424f8", f"push qword ptr [r12-8]; {POP}; push 0x1005; {HIGH}; {BELOW}", False),
    ("2eff10", f"push qword ptr [rax]; {POP}; push 0x1003; {HIGH}; {BELOW}", False),
    ("3eff10", f"push qword ptr [rax]; {POP}; push 0x1003; {HIGH}; notrack {BELOW}", False),
    ("4fff10", f"push qword ptr [r8]; {POP}; push 0x1003; {HIGH}; {BELOW}", False),
    ("ffe0", "jmp rax", False),
    ("3effe0", "notrack jmp rax", False),
    ("ff2510000000", "jmp qword ptr [0x7f0000001016]", False),
    ("ff642408", "jmp qword ptr [rsp+8]", False),
    ("c3", "ret", False),
    ("f3c3", "rep ret", False),
    ("c20800", "ret 8", False),
    ("eb10", "jmp 0x7f0000001012", False),
    ("e910000000", "jmp 0x7f0000001015", False),
    ("f2eb10", "jmp 0x7f0000001013", False),
    ("7410", "je 0x7f0000001012", True),
    ("0f8410000000", "je 0x7f0000001016", True),
    ("3e7410", "je 0x7f0000001013", True),
    ("0f8f00ffffff", "jg 0x7f0000000f06", True),
    ("e2f0", "loop 0x7f0000100004; jmp 0x7f0000100009; jmp 0x7f0000000ff2", True),
    ("e110", "loope 0x7f0000100004; jmp 0x7f0000100009; jmp 0x7f0000001012", True),
    ("e010", "loopne 0x7f0000100004; jmp 0x7f0000100009; jmp 0x7f0000001012", True),
    ("e310", "jrcxz 0x7f0000100004; jmp 0x7f0000100009; jmp 0x7f0000001012", True),
    ("67e310", "jecxz 0x7f0000100005; jmp 0x7f000010000a; jmp 0x7f0000001013", True),
    ("67e210", "addr32 loop 0x7f0000100005; jmp 0x7f000010000a; jmp 0x7f0000001013", True),
    ("0f05", "syscall; mov rcx, 0x7f0000001002", True),
    ("cd80", "int 0x80", True),
    ("0f0b", "ud2", False),
    ("f4", "hlt", True),
    ("c7f810000000", "xbegin 0x7f0000001016", True),
    ("cf", "iretd", False),
    ("488d642410", "lea rsp, [rsp+0x10]", True),
    ("f30f1efa", "endbr64", True),
]


def listing(code: bytes, address: int) -> list[str]:
    formatter = Formatter(FormatterSyntax.INTEL)
    formatter.hex_prefix, formatter.hex_suffix, formatter.uppercase_hex = "0x", "", False
    formatter.branch_leading_zeros, formatter.show_branch_size = False, False
    formatter.rip_relative_addresses, formatter.space_after_operand_separator = False, True
    return [formatter.format(instruction) for instruction in Decoder(64, code, ip=address)]


@pytest.mark.parametrize(("code", "expected", "comes_back"), FORMS)
def test_forms(code: str, expected: str, comes_back: bool) -> None:
    raw = bytes.fromhex(code)
    copy = displaced(raw, ORIGINAL, COPY)
    assert copy is not None
    assert copy.comes_back is comes_back
    back = [f"jmp {ORIGINAL + len(raw):#x}"] if comes_back else []
    assert listing(copy.code, COPY) == [*expected.split("; "), *back]
    assert copy.boundaries[0] == CodeCopy(COPY, ORIGINAL, exact=True)
    starts = [instruction.ip for instruction in Decoder(64, copy.code, ip=COPY)]
    assert [boundary.copy for boundary in copy.boundaries] == starts


@pytest.mark.parametrize("code", [code for code, _, _ in FORMS])
def test_the_size_depends_on_the_original_alone(code: str) -> None:
    raw = bytes.fromhex(code)
    copies = [displaced(raw, ORIGINAL, at) for at in (ORIGINAL, COPY, ORIGINAL - 0x7000_0000, ORIGINAL + 0x7000_0001)]
    assert len({len(copy.code) for copy in copies if copy is not None}) == 1
    assert None not in copies


def test_an_address_of_31_bits_is_pushed_at_once() -> None:
    copy = displaced(bytes.fromhex("ffd0"), 0x401000, 0x10401000)
    assert copy is not None
    assert listing(copy.code, 0x10401000) == ["push 0x401002", "jmp rax"]
    assert copy.boundaries[1:] == (CodeCopy(0x10401005, 0x401000, exact=False),)


def test_an_address_of_32_bits_is_not_sign_extended() -> None:
    copy = displaced(bytes.fromhex("ffd0"), 0x9000_0000, 0x9010_0000)
    assert copy is not None
    assert copy.code.hex(" ") == "68 02 00 00 90 c7 44 24 04 00 00 00 00 ff e0"


def test_a_window_has_a_boundary_for_each_instruction() -> None:
    raw = bytes.fromhex("55 4889e5 7402 e800000000")  # push rbp; mov rbp, rsp; je +2; call
    copy = displaced(raw, ORIGINAL, COPY)
    assert copy is not None
    assert copy.boundaries == (
        CodeCopy(COPY, ORIGINAL, exact=True),
        CodeCopy(COPY + 1, ORIGINAL + 1, exact=True),
        CodeCopy(COPY + 4, ORIGINAL + 4, exact=True),
        CodeCopy(COPY + 10, ORIGINAL + 6, exact=True),
        CodeCopy(COPY + 15, ORIGINAL + 6, exact=False),  # half of the return address is there
        CodeCopy(COPY + 23, ORIGINAL + 11, exact=True),  # the call is done: its target is what follows it
    )
    assert [copy.copy_of(ORIGINAL + n) for n in (0, 1, 4, 6)] == [COPY, COPY + 1, COPY + 4, COPY + 10]
    assert [copy.copy_of(ORIGINAL + n) for n in (2, 11)] == [None, None]


def test_code_that_leads_on_has_no_jump_at_its_end() -> None:
    raw = bytes.fromhex("55 4889e5")
    copy = displaced(raw, ORIGINAL, COPY, goes_back=False)
    assert copy is not None
    assert (copy.code, copy.comes_back) == (raw, True)
    assert copy.boundaries == (CodeCopy(COPY, ORIGINAL, exact=True), CodeCopy(COPY + 1, ORIGINAL + 1, exact=True))


def test_each_address_of_a_copy_belongs_to_an_instruction() -> None:
    copy = displaced(bytes.fromhex("55 4889e5 90"), ORIGINAL, COPY)
    assert copy is not None
    pieces = [copy.at(COPY + n) for n in range(10)]
    assert [piece and piece.original - ORIGINAL for piece in pieces] == [0, 1, 1, 1, 4, 5, 5, 5, 5, 5]
    assert copy.at(COPY - 1) is None
    assert copy.at(COPY + 10) is None


def test_a_loop_that_goes_on_is_at_what_follows() -> None:
    copy = displaced(bytes.fromhex("e2fe 90 90"), ORIGINAL, COPY)
    assert copy is not None
    taken = [boundary for boundary in copy.boundaries if boundary.original == ORIGINAL]
    assert [boundary.copy for boundary in taken] == [COPY, COPY + 4]
    assert copy.copy_of(ORIGINAL) == COPY
    assert copy.copy_of(ORIGINAL + 2) == COPY + 2


@pytest.mark.parametrize("code", ["31c0", "488b0510000000", "ff1510000000", "7410", "e810000000", "eb10", "e210"])
def test_a_copy_that_cannot_reach_what_it_names_is_none(code: str) -> None:
    assert displaced(bytes.fromhex(code), ORIGINAL, ORIGINAL + (1 << 31) + 100) is None
    assert displaced(bytes.fromhex(code), ORIGINAL, ORIGINAL - (1 << 31) - 100) is None


@pytest.mark.parametrize("code", ["ffd0", "ffe0", "c3", "0f0b", "ff10"])
def test_what_names_nothing_can_be_copied_far_away(code: str) -> None:
    assert displaced(bytes.fromhex(code), ORIGINAL, 0x1000) is not None


def test_an_operand_relative_to_eip_keeps_its_address_at_any_distance() -> None:
    raw = bytes.fromhex("67488b0510000000")
    for at in (COPY, ORIGINAL + 0x7FFF_0000, ORIGINAL - 0x7FFF_0000):
        copy = displaced(raw, ORIGINAL, at)
        assert copy is not None
        assert Decoder(64, copy.code, ip=at).decode().ip_rel_memory_address == ORIGINAL + len(raw) + 16 & 0xFFFFFFFF


def test_a_jump_ends_in_the_distance_from_its_end() -> None:
    assert jump(0x1000, 0x1005).hex(" ") == "e9 00 00 00 00"
    assert jump(0x1000, 0x1000).hex(" ") == "e9 fb ff ff ff"
    with pytest.raises(OverflowError):
        jump(0x1000, 0x1005 + (1 << 31))
