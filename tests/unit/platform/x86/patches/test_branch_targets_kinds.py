"""What instructions do to control, and which of them are never executed elsewhere."""

from __future__ import annotations

import pytest
from iced_x86 import Decoder, Instruction

from dprobes.platform.x86.patches.branch_targets import Kind, kind_of, legacy_prefixes, undisplaceable

KINDS = [
    ("31c0", Kind()),  # xor eax, eax
    ("f30f1efa", Kind()),  # endbr64
    ("f4", Kind()),  # hlt: faults
    ("7400", Kind(is_branch=True)),  # je
    ("e200", Kind(is_branch=True)),  # loop
    ("c7f800000000", Kind(is_branch=True)),  # xbegin
    ("eb00", Kind(leaves=True, is_branch=True)),  # jmp
    ("ffe0", Kind(leaves=True, is_branch=True)),  # jmp rax
    ("c3", Kind(leaves=True)),  # ret
    ("0f0b", Kind(leaves=True)),  # ud2
    ("e800000000", Kind(leaves=True, calls=True, is_branch=True)),  # call
    ("ff10", Kind(leaves=True, calls=True, is_branch=True)),  # call [rax]
    ("0f05", Kind(is_system_call=True)),  # syscall
    ("cd80", Kind(is_system_call=True)),  # int 0x80
]
REFUSED = [
    ("cc", "it is a software interrupt"),  # int3
    ("f1", "it is a software interrupt"),  # int1
    ("cd03", "it is a software interrupt"),
    ("06", "it is not a valid instruction"),  # push es, in 32-bit code
    ("ff18", "it is a far call, which pushes the address of its copy"),
    ("0f34", "it enters the kernel and comes back elsewhere"),  # sysenter
    ("66e800000000", "it is a branch with an operand-size prefix, which processors understand differently"),
    ("66ffe0", "it is a branch with an operand-size prefix, which processors understand differently"),
]
TAKEN = ["cd80", "0f05", "66c3", "6690", "f2e800000000", "3e7400", "67e300", "ff28", "cf", "0f01c1"]


def decoded(code: str) -> tuple[Instruction, bytes]:
    raw = bytes.fromhex(code)
    return Decoder(64, raw).decode(), raw


@pytest.mark.parametrize(("code", "kind"), KINDS)
def test_kinds(code: str, kind: Kind) -> None:
    assert kind_of(decoded(code)[0].code) == kind


@pytest.mark.parametrize(("code", "reason"), REFUSED)
def test_what_is_refused_has_a_reason(code: str, reason: str) -> None:
    assert undisplaceable(*decoded(code)) == reason


@pytest.mark.parametrize("code", [*TAKEN, *(code for code, _ in KINDS)])
def test_everything_else_is_taken(code: str) -> None:
    assert undisplaceable(*decoded(code)) is None


def test_prefixes_are_counted_up_to_rex_and_opcode() -> None:
    assert legacy_prefixes(bytes.fromhex("f2663e48ff10")) == 3
    assert legacy_prefixes(bytes.fromhex("48ff10")) == 0
