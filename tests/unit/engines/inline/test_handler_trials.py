"""What has to be tried before a handler of each kind of instruction, and of which that cannot be."""

from __future__ import annotations

import pytest
from iced_x86 import Register

from dprobes.engines.inline.handler_trials import Trial, trial_of

UNKNOWN = "faults of its instruction cannot be predicted: "


def trial(raw: str) -> Trial:
    found = trial_of(bytes.fromhex(raw))
    assert isinstance(found, Trial)
    return found


@pytest.mark.parametrize(
    "raw",
    [
        "55",  # push rbp
        "488b05d02e0000",  # mov rax, [rip+0x2ed0]
        "8f442408",  # pop [rsp+8]
        "4899",  # cqo
        "f390",  # pause
        "0f18 08",  # prefetcht0 [rax]
        "660fefc0",  # pxor xmm0, xmm0
        "0f10c1",  # movups xmm0, xmm1
        "9c",  # pushfq
    ],
)
def test_what_always_completes_needs_none(raw: str) -> None:
    assert trial_of(bytes.fromhex(raw)) is None


@pytest.mark.parametrize(
    ("raw", "accesses"),
    [
        ("488b07", [("RDI", "NONE", 0, 8, False, 1, True)]),  # mov rax, [rdi]
        ("8844b3ff", [("RBX", "RSI", -1, 1, True, 1, True)]),  # mov [rbx+rsi*4-1], al
        ("48ff08", [("RAX", "NONE", 0, 8, True, 1, True)]),  # dec qword [rax]
        ("f0480fb10f", [("RDI", "NONE", 0, 8, True, 1, True)]),  # lock cmpxchg [rdi], rcx
        ("64488b042528000000", [("NONE", "NONE", 0x28, 8, False, 1, True)]),  # mov rax, fs:[0x28]
        ("c9", [("RBP", "NONE", 0, 8, False, 1, True)]),  # leave
        ("ff37", [("RDI", "NONE", 0, 8, False, 1, True)]),  # push [rdi]
        ("a4", [("RDI", "NONE", 0, 1, True, 1, True), ("RSI", "NONE", 0, 1, False, 1, True)]),  # movsb
        ("660f6f07", [("RDI", "NONE", 0, 16, False, 16, True)]),  # movdqa xmm0, [rdi]
        ("f30f6f07", [("RDI", "NONE", 0, 16, False, 1, True)]),  # movdqu xmm0, [rdi]
        ("0f28442410", [("RSP", "NONE", 0x10, 16, False, 16, False)]),  # movaps xmm0, [rsp+16]
        ("480fc70f", [("RDI", "NONE", 0, 16, True, 16, True)]),  # cmpxchg16b [rdi]
    ],
)
def test_memory_is_touched_as_the_instruction_does(raw: str, accesses: list[tuple[object, ...]]) -> None:
    names = {number: name for name, number in vars(Register).items() if isinstance(number, int)}
    found = [
        (names[a.base], names[a.index_register], a.displacement, a.size, a.stores, a.alignment, a.touched)
        for a in trial(raw).accesses
    ]
    assert found == accesses


def test_a_division_is_done_in_vain() -> None:
    assert trial("48f7f1") == Trial(bytes.fromhex("48f7f1"), is_executed=True)  # div rcx
    assert trial("48f73f") == Trial(bytes.fromhex("48f73f"), is_executed=True)  # idiv qword [rdi]


def test_exceptions_about_floating_point_numbers_must_be_masked() -> None:
    assert trial("0f58c1").needs_masks  # addps xmm0, xmm1
    assert trial("f2480f2ac0").needs_masks  # cvtsi2sd xmm0, rax
    assert not trial("f30f1000").needs_masks  # movss xmm0, [rax]


@pytest.mark.parametrize("raw", ["c3", "ffe0", "ff13", "ff2500100000"])  # ret, jmp rax, call [rbx], jmp [rip+0x1000]
def test_where_it_goes_must_be_an_address(raw: str) -> None:
    assert trial(raw).has_target


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("f3a4", "it repeats, and may stop in the middle"),  # rep movsb
        ("0fa307", "its address depends on the number of a bit"),  # bt [rdi], eax
        ("0f0b", "it always raises a signal"),  # ud2
        ("d9ee", "it uses the x87 unit, whose exceptions are delayed"),  # fldz
        ("0f6fc1", "it uses the x87 unit, whose exceptions are delayed"),  # movq mm0, mm1
        ("678b07", "its address has 32 bits"),  # mov eax, [edi]
        ("a1aaaaaaaaaaaaaaaa", "no single instruction computes its address"),
        ("64660f6f07", "no single instruction computes its address"),  # movdqa fs:[rdi]
        ("0f05", "it is not in the list of known instructions"),  # syscall
        ("0f20c0", "it is not in the list of known instructions"),  # mov rax, cr0
        ("8ed8", "it is not in the list of known instructions"),  # mov ds, eax
        ("06", "it is not a valid instruction"),
    ],
)
def test_of_others_nobody_knows(raw: str, reason: str) -> None:
    assert trial_of(bytes.fromhex(raw)) == UNKNOWN + reason
