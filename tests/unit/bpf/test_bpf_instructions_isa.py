"""The numbers of the instruction set are those of the kernel's headers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dprobes.bpf.bpf_instructions import Alu, Atomic, Class, Helper, Jump, Mode, Size, X

HEADER = Path("/usr/include/linux/bpf.h")
COMMON = Path("/usr/include/linux/bpf_common.h")


def constants() -> dict[str, int]:
    if not HEADER.exists():
        pytest.skip(f"{HEADER} is not there (apt install linux-libc-dev)")
    found: dict[str, int] = {}
    for text in (COMMON.read_text(), HEADER.read_text()):
        for name, value in re.findall(r"^#define\s+\t*BPF_(\w+)\s+(0x[0-9a-f]+)\b", text, re.MULTILINE):
            found[name] = int(value, 16)
    found["FETCH"] = 1
    return found


@pytest.mark.parametrize("numbers", [Class, Alu, Jump, Size, Mode], ids=lambda numbers: numbers.__name__)
def test_operations_are_numbered_as_in_the_header(numbers: type) -> None:
    known = constants()
    # MAY_GOTO is written BPF_JCOND there, and younger than many headers.
    members = [m for m in numbers if m.name in known]  # type: ignore[attr-defined]
    assert len(members) >= len(list(numbers)) - 1  # type: ignore[call-overload]
    assert {m.name: m.value for m in members} == {m.name: known[m.name] for m in members}


def test_the_bit_of_the_source_operand_is_that_of_the_header() -> None:
    assert constants()["X"] == X


def test_atomic_operations_are_arithmetic_ones_and_two_more() -> None:
    assert {a.name: a.value for a in Atomic if a.name in Alu.__members__} == {
        name: Alu[name].value for name in ("ADD", "OR", "AND", "XOR")
    }
    assert (Atomic.XCHG, Atomic.CMPXCHG) == (0xE0 | Atomic.FETCH, 0xF0 | Atomic.FETCH)


def test_helpers_are_numbered_as_in_the_header() -> None:
    if not HEADER.exists():
        pytest.skip(f"{HEADER} is not there (apt install linux-libc-dev)")
    text = HEADER.read_text()
    known = {name: int(number) for name, number in re.findall(r"\bFN\((\w+), (\d+), ", text)}
    if not known:  # before 6.1: a list in order, from 0
        listed = re.search(r"#define __BPF_FUNC_MAPPER\(FN\)(.*?)\n\n", text, re.DOTALL)
        assert listed is not None
        known = {name: number for number, name in enumerate(re.findall(r"FN\((\w+)\)", listed[1]))}
    assert {h.name.lower(): h.value for h in Helper} == {h.name.lower(): known[h.name.lower()] for h in Helper}


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_sizes_know_their_bytes(count: int) -> None:
    assert Size.of(count).bytes == count
