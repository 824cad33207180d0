"""What the kernel does with an instruction that carries a uprobe; the running kernel is asked in tests/integration."""

from __future__ import annotations

import pytest

from dprobes.target.code.machine_code import DecodedInstruction
from dprobes.target.code.uprobe_sites import UprobeClass, has_no_effect, is_replaced_by_call, refusal, uprobe_class

EMULATED, STEPPED, REFUSED, BROKEN = UprobeClass
NO_UPROBE = "the kernel puts no uprobe on it"
FOR_EVER = "the kernel steps it for ever in a process that may not use the state of AMX"
NOT_EVERY = "not every kernel can decode it"
AS_JUMP = "the kernel mistakes it for a jump and does not execute it"
AS_NOP = "the kernel mistakes it for a nop and does not execute it"
RED_ZONE = "kernels from 6.18 on put a call there, which overwrites what the function keeps below its stack"


def prefix(name: str) -> str:
    return f"the kernel puts no uprobe on instructions with the prefix '{name}'"


ROWS = [
    ("55", "push rbp", EMULATED, None),
    ("4157", "push r15", EMULATED, None),
    ("4055", "rex push rbp", STEPPED, None),
    ("6655", "push bp", STEPPED, None),
    ("ff7308", "push [rbx+8]", STEPPED, None),
    ("90", "nop", EMULATED, None),
    ("f390", "pause", EMULATED, None),
    ("6690", "xchg ax, ax", REFUSED, "not every kernel puts a uprobe on it"),
    ("4990", "xchg r8, rax", BROKEN, AS_NOP),
    ("0f1f4000", "nop [rax]", STEPPED, None),
    ("0f1f440000", "nop [rax+rax]", STEPPED, RED_ZONE),
    ("f30f1efa", "endbr64", STEPPED, None),
    ("eb10", "jmp", EMULATED, None),
    ("e900010000", "jmp", EMULATED, None),
    ("e800010000", "call", EMULATED, None),
    ("6648e800010000", "call", REFUSED, "the kernel puts no uprobe on jumps and calls with the prefix 66"),
    ("7410", "je", EMULATED, None),
    ("0f8400010000", "je", EMULATED, None),
    ("ff2500010000", "jmp [rip+0x100]", STEPPED, None),
    ("3effe0", "notrack jmp rax", REFUSED, prefix("ds")),
    ("ff5b08", "call far [rbx+8]", BROKEN, "the kernel takes its return address for a near one"),
    ("c3", "ret", STEPPED, None),
    ("4889e5", "mov rbp, rsp", STEPPED, None),
    ("64488b042528000000", "mov rax, fs:[0x28]", STEPPED, None),
    ("488d0500010000", "lea rax, [rip+0x100]", STEPPED, None),
    ("f048ff00", "lock inc qword ptr [rax]", REFUSED, prefix("lock")),
    ("662e0f1f840000000000", "nop cs:[rax+rax]", REFUSED, prefix("cs")),
    ("9c", "pushfq", BROKEN, "the kernel steps it, and the trap flag would show on the stack"),
    ("9d", "popfq", STEPPED, None),
    ("f4", "hlt", REFUSED, NO_UPROBE),
    ("ec", "in al, dx", REFUSED, NO_UPROBE),
    ("8ed0", "mov ss, eax", REFUSED, "it suspends debug exceptions, and the kernel puts no uprobe on it"),
    ("8ed8", "mov ds, eax", STEPPED, None),
    ("0f05", "syscall", BROKEN, "the kernel cannot step it"),
    ("0fae2f", "xrstor [rdi]", BROKEN, FOR_EVER),
    ("480fae2f", "xrstor64 [rdi]", BROKEN, FOR_EVER),
    ("0faee8", "lfence", STEPPED, None),
    ("0fae27", "xsave [rdi]", STEPPED, None),
    ("c4e27b490c", "tilezero", BROKEN, FOR_EVER),
    ("c4e27b4b0c37", "tileloadd tmm1, [rdi+rsi]", BROKEN, FOR_EVER),
    ("c4e26b5ec2", "tdpbssd", BROKEN, FOR_EVER),
    ("0f0b", "ud2", STEPPED, None),
    ("f3a4", "rep movsb", BROKEN, "the kernel steps it element by element, and each would be a hit"),
    ("a4", "movsb", STEPPED, None),
    ("660fefc0", "pxor xmm0, xmm0", STEPPED, None),
    ("c5f9efc0", "vpxor xmm0, xmm0, xmm0", REFUSED, NO_UPROBE),
    ("c5f9ebc1", "vpor xmm0, xmm0, xmm1", BROKEN, AS_JUMP),
    ("c5f877", "vzeroupper", BROKEN, AS_JUMP),
    ("62f17e487f07", "vmovdqu32 [rdi], zmm0", BROKEN, AS_JUMP),
    ("c4e279900c07", "vpgatherdd xmm1, [rdi+xmm0], xmm0", BROKEN, AS_NOP),
    (
        "c5f8c2c101",
        "vcmpps xmm0, xmm0, xmm1, 1",
        BROKEN,
        "the kernel mistakes it for a return, and the program would continue in the page where it was stepped",
    ),
    (
        "c4e2f99dc1",
        "vfnmadd132sd xmm0, xmm0, xmm1",
        BROKEN,
        "the kernel mistakes it for popf and leaves the trap flag set",
    ),
    ("c5f858c1", "vaddps xmm0, xmm0, xmm1", STEPPED, None),
    ("c4e379680011", "vfmaddps xmm0, xmm0, [rax], xmm1", REFUSED, NOT_EVERY),
    ("660f78c10503", "extrq xmm1, 5, 3", REFUSED, NOT_EVERY),
    ("486689c8", "mov ax, cx", REFUSED, NOT_EVERY),
    ("8fe878c00011", "vprotb xmm0, [rax], 0x11", REFUSED, NOT_EVERY),
    ("8f00", "pop qword ptr [rax]", STEPPED, None),
]


def decoded(raw: bytes, text: str) -> DecodedInstruction:
    return DecodedInstruction(0x1000, len(raw), raw, text, raw[0], text.split(maxsplit=1)[0], 0x1000)


@pytest.mark.parametrize(("code", "text", "answer", "reason"), ROWS, ids=[row[1] for row in ROWS])
def test_64_bit_instructions(code: str, text: str, answer: UprobeClass, reason: str | None) -> None:
    raw = bytes.fromhex(code)
    assert uprobe_class(raw, 64) is answer
    assert refusal(decoded(raw, text), 64) == reason


ROWS_32 = [
    ("55", EMULATED),
    ("41", STEPPED),  # inc ecx, no prefix
    ("9a000000002300", STEPPED),  # call far
    ("c5c0", REFUSED),  # cut off: a vector instruction
    ("c500", STEPPED),  # lds
    ("62c8", REFUSED),  # cut off
    ("6208", STEPPED),  # bound
    ("d50a", STEPPED),  # aad
    ("1f", REFUSED),  # pop ds
    ("1e", STEPPED),  # push ds
    ("f30f1efb", STEPPED),
    ("9c", BROKEN),
    ("0f34", BROKEN),
    ("c5f9ebc1", BROKEN),
]


@pytest.mark.parametrize(("code", "answer"), ROWS_32, ids=[row[0] for row in ROWS_32])
def test_32_bit_instructions(code: str, answer: UprobeClass) -> None:
    assert uprobe_class(bytes.fromhex(code), 32) is answer


def test_what_no_breakpoint_can_carry_is_refused_with_that_reason() -> None:
    assert refusal(decoded(b"\xcc", "int3"), 64) == "it is a breakpoint instruction itself"
    assert refusal(decoded(b"\xcd\x80", "int 0x80"), 32) == "it is a software interrupt"
    assert refusal(decoded(b"\x06", "(bad)"), 64) == "it is not a valid instruction"


@pytest.mark.parametrize("code", ["0f1f440000", "410f1f4000", "f30f1f4000", "6666666690", "e900000000"])
def test_a_nop_of_five_bytes_is_replaced_by_a_call_and_so_is_for_entries_only(code: str) -> None:
    raw = bytes.fromhex(code)
    assert is_replaced_by_call(raw, 64)
    assert not is_replaced_by_call(raw, 32)
    if 0x66 not in raw:
        assert refusal(decoded(raw, "nop"), 64) == RED_ZONE
        assert refusal(decoded(raw, "nop"), 64, at_entry=True) is None
        assert refusal(decoded(raw, "nop"), 32) is None


def test_only_nops_and_landing_marks_have_no_effect() -> None:
    for code in ("90", "0f1f00", "662e0f1f840000000000", "f30f1efa", "f30f1efb", "eb00"):
        assert has_no_effect(bytes.fromhex(code), 64), code
    for code in ("4990", "55", "f30f1ec8", "0f1ec8", "0f1fc8", "eb01", "c5f990c1", "4889c0", "c3", ""):
        assert not has_no_effect(bytes.fromhex(code), 64), code
