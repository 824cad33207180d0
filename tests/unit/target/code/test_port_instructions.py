"""Port instructions in code: which bytes are one, and what each accesses."""

from __future__ import annotations

import pytest

from dprobes.target.code.port_instructions import PortAccess, PortRange, port_accesses

FORMS = {
    "ec": PortAccess(is_output=False, width=1),
    "ed": PortAccess(is_output=False, width=4),
    "66ed": PortAccess(is_output=False, width=2),
    "48ed": PortAccess(is_output=False, width=4),
    "e470": PortAccess(is_output=False, width=1, port=0x70),
    "e5a0": PortAccess(is_output=False, width=4, port=0xA0),
    "e671": PortAccess(is_output=True, width=1, port=0x71),
    "66e780": PortAccess(is_output=True, width=2, port=0x80),
    "ee": PortAccess(is_output=True, width=1),
    "66ef": PortAccess(is_output=True, width=2),
    "6c": PortAccess(is_output=False, width=1),
    "66f36d": PortAccess(is_output=False, width=2, count_size=8),
    "f26e": PortAccess(is_output=True, width=1, count_size=8),
    "67f36f": PortAccess(is_output=True, width=4, count_size=4),
}


@pytest.mark.parametrize("code", FORMS)
def test_each_form_is_found_with_its_access(code: str) -> None:
    raw = bytes.fromhex(code)
    nop = b"\x90"
    assert list(port_accesses(nop + raw + nop, 64, 0x1000)) == [(1, raw, FORMS[code])]


def test_a_count_has_the_size_of_addresses() -> None:
    assert [each.count_size for _, _, each in port_accesses(bytes.fromhex("f36c 67f36c"), 32, 0)] == [4, 2]


def test_a_byte_within_another_instruction_is_none() -> None:
    """The last byte of ``sub rsp``, ``mov rdi, rbp`` and ``mov eax`` with an immediate."""
    assert list(port_accesses(bytes.fromhex("4883ec20 4889ef b8eceeecee c3"), 64, 0)) == []


def test_an_access_touches_ports_with_each_of_its_bytes() -> None:
    ports = PortRange(0x71, 0x72)
    touched = {
        (width, port)
        for width in (1, 2, 4)
        for port in range(0x6C, 0x78)
        if ports.may_be_touched(PortAccess(is_output=True, width=width, port=port))
    }
    expected = {(1, 0x71), (1, 0x72), *((2, n) for n in range(0x70, 0x73)), *((4, n) for n in range(0x6E, 0x73))}
    assert touched == expected
    assert ports.may_be_touched(PortAccess(is_output=True, width=1))
    assert PortRange(0, 1).ports_of(4) == range(2)
