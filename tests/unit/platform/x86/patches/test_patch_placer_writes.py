"""The bytes that are written for a plan, and where they lead to when they are decoded in their place."""

from __future__ import annotations

from random import Random

import pytest
from iced_x86 import Decoder

from dprobes.platform.x86.patches.branch_targets import CodeBytes
from dprobes.platform.x86.patches.patch_placer import Write, leads_to, writes_of
from dprobes.platform.x86.patches.patch_plans import Method, Plan, Reach

START = 0x7F00_0000_1000


def plan_of(method: Method, written: int, reach: Reach, padding: int | None = None) -> Plan:
    return Plan(method, START, START, b"\x90" * written, (1,) * written, written, (reach,), padding)


def test_a_jump_is_written_at_once() -> None:
    reach = Reach(0, START, START + 0x10000)
    writes = writes_of(plan_of(Method.JUMP, 5, reach), reach, START + 0x1234)
    assert writes == (Write(START, bytes.fromhex("e9 2f 12 00 00")),)


def test_of_a_punned_jump_only_its_own_bytes_are_written() -> None:
    reach = Reach(1, START + 6 + 0x33221100, START + 6 + 0x332211FF)
    writes = writes_of(plan_of(Method.PUN, 3, reach), reach, reach.first + 0x7F)
    assert writes == (Write(START, bytes.fromhex("2e e9 7f")),)


def test_the_jump_in_the_padding_is_written_before_what_leads_to_it() -> None:
    reach = Reach(0, START, START + 0x10000)
    writes = writes_of(plan_of(Method.SHORT, 2, reach, START - 0x20), reach, START + 0x1000)
    assert writes == (
        Write(START - 0x20, bytes.fromhex("e9 1b 10 00 00")),
        Write(START, bytes.fromhex("eb de")),
    )
    writes = writes_of(plan_of(Method.SHORT, 1, reach, START + 0x7), reach, START + 0x1000)
    assert writes[1] == Write(START, b"\xeb")


@pytest.mark.parametrize("prefixes", range(4))
def test_a_punned_jump_leads_to_its_trampoline(prefixes: int) -> None:
    random = Random(prefixes)
    for _ in range(200):
        size = random.randrange(prefixes + 1, 5)
        code = CodeBytes(START, random.randbytes(32))
        end = START + prefixes + 5
        upper = code.original[size : prefixes + 5]
        first = end + int.from_bytes(bytes(4 - len(upper)) + upper, "little", signed=True)
        reach = Reach(prefixes, first, first + (1 << 8 * (4 - len(upper))) - 1)
        trampoline = random.randint(reach.first, reach.last)
        for write in writes_of(plan_of(Method.PUN, size, reach), reach, trampoline):
            code.write(write.address, write.data)
        assert code.current[size:] == code.original[size:]
        assert leads_to(code, START) == trampoline
        assert Decoder(64, bytes(code.current), ip=START).decode().len == prefixes + 5


@pytest.mark.parametrize("code", ["90", "e8 00000000", "eb 7f", "eb 80", "ff25 00000000", "74 00", "e9 0000"])
def test_what_is_no_jump_leads_nowhere(code: str) -> None:
    raw = bytes.fromhex(code)
    assert leads_to(CodeBytes(START, raw), START) is None


def test_a_short_jump_to_something_else_leads_nowhere() -> None:
    assert leads_to(CodeBytes(START, bytes.fromhex("eb 01 90 90 90 90 90 90")), START) is None
    assert leads_to(CodeBytes(START, bytes.fromhex("eb 01 90 e9 00 01 00 00")), START) == START + 8 + 0x100
