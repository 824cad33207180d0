"""Instructions to bytes and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.bpf.bpf_instructions import INSN_SIZE, WIDE_LOAD, Insn, LoadImmediate, decode, encode

INSNS = st.builds(
    Insn,
    st.integers(0, 255),
    st.integers(0, 15),
    st.integers(0, 15),
    st.integers(-(1 << 15), (1 << 15) - 1),
    st.integers(-(1 << 31), (1 << 31) - 1),
)


@pytest.mark.parametrize(
    ("insn", "encoded"),
    [
        # From RFC 9669 and the kernel's tools/testing/selftests/bpf: opcode, src and dst, offset, immediate.
        (Insn(0x95), "9500000000000000"),
        (Insn(0xBF, 6, 1), "bf16000000000000"),
        (Insn(0x79, 2, 6, 112), "7962700000000000"),
        (Insn(0x6D, 1, 2, -3), "6d21fdff00000000"),
        (Insn(0xB7, 0, 0, 0, -5), "b7000000fbffffff"),
        (Insn(0x85, 0, 0, 0, 112), "8500000070000000"),
        (Insn(0xDB, 10, 9, -8, 0xE1), "db9af8ffe1000000"),
        (Insn(0xE5, 0, 0, 7), "e500070000000000"),
    ],
)
def test_instructions_have_the_bytes_of_the_standard(insn: Insn, encoded: str) -> None:
    assert encode([insn]).hex() == encoded


@given(st.lists(INSNS))
def test_what_is_encoded_is_decoded(code: list[Insn]) -> None:
    assert list(decode(encode(code))) == code


@given(st.binary(max_size=80).map(lambda data: data[: len(data) // INSN_SIZE * INSN_SIZE]))
def test_what_is_decoded_is_encoded(data: bytes) -> None:
    assert encode(decode(data)) == data


@pytest.mark.parametrize("kind", LoadImmediate)
def test_map_references_are_known(kind: LoadImmediate) -> None:
    is_reference = kind in (LoadImmediate.MAP, LoadImmediate.MAP_VALUE)
    assert Insn(WIDE_LOAD, 1, kind).is_map_reference == is_reference
    assert not Insn(0xBF, 1, kind).is_map_reference
