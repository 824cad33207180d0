"""Descriptors as the processor has them in its tables."""

from __future__ import annotations

import pytest

from dprobes.engines.ptrace.tracer.handler_context import decode_descriptor


def raw(base: int, limit: int, access: int, flags: int) -> bytes:
    """Return a descriptor; ``access`` is its byte 5, ``flags`` the upper half of its byte 6."""
    low = limit & 0xFFFF | (base & 0xFFFFFF) << 16 | access << 40
    return (low | (limit >> 16) << 48 | flags << 52 | (base >> 24) << 56).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("access", "flags", "fields"),
    [
        # The type's bits: 8 code, 4 expand-down, 2 writable or readable; 0xf0: present, privilege 3, a segment.
        (0xF2, 0x4, {"contents": 0, "read_exec_only": 0, "is_32_bit": 1, "limit_in_pages": 0}),
        (0xF0, 0xC, {"contents": 0, "read_exec_only": 1, "is_32_bit": 1, "limit_in_pages": 1}),
        (0xF6, 0x0, {"contents": 1, "read_exec_only": 0, "is_32_bit": 0, "limit_in_pages": 0}),
        (0xFA, 0x4, {"contents": 2, "read_exec_only": 0, "is_32_bit": 1, "limit_in_pages": 0}),
        (0xF9, 0x5, {"contents": 2, "read_exec_only": 1, "is_32_bit": 1, "usable": 1}),
        (0xFA, 0x2, {"contents": 2, "read_exec_only": 0, "is_32_bit": 0, "lm": 1}),
    ],
)
def test_the_fields_of_a_descriptor(access: int, flags: int, fields: dict[str, int]) -> None:
    descriptor = decode_descriptor(raw(0x89ABCDEF, 0xFEDCB, access, flags))
    assert descriptor is not None
    assert (descriptor.base, descriptor.limit, descriptor.not_present) == (0x89ABCDEF, 0xFEDCB, 0)
    assert {name: getattr(descriptor, name) for name in fields} == fields


@pytest.mark.parametrize("access", [0x00, 0x72, 0xD2, 0xE2, 0x92], ids=lambda access: f"{access:#x}")
def test_what_programs_cannot_use_is_no_descriptor(access: int) -> None:
    # Nothing, not present, privilege 2, a system descriptor, privilege 0.
    assert decode_descriptor(raw(0, 0xFFFFF, access, 0x4)) is None
