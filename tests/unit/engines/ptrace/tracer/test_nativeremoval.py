"""Whether memory names an address of ours."""

from __future__ import annotations

import struct

import pytest

from dprobes.engines.ptrace.tracer.nativeremoval import names_address

START, END = 0x7F12_3456_F000, 0x7F12_3457_2000


@pytest.mark.parametrize("offset", [0, 3, 8, 100])
@pytest.mark.parametrize("address", [START, START + 1, 0x7F12_3457_0000, END - 1])
def test_an_address_is_found_wherever_it_is(address: int, offset: int) -> None:
    data = b"\x56" * offset + struct.pack("<Q", address) + b"\x56" * 9
    assert names_address(data, START, END)


@pytest.mark.parametrize("address", [START - 1, END, END + 0x10000, 0])
def test_another_is_not(address: int) -> None:
    assert not names_address(struct.pack("<Q", address) * 3, START, END)


def test_a_part_of_one_is_not() -> None:
    whole = struct.pack("<Q", START)
    assert not names_address(whole[2:], START, END)
    assert not names_address(whole[:7], START, END)
    assert not names_address(b"", START, END)
