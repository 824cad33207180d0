"""Atomic operations do what RFC 9669 says, with all registers."""

from __future__ import annotations

import pytest

from dprobes.bpf.bpf_instructions import Size
from support.a64_pieces import pieces
from support.ebpf_model import check_atomics


@pytest.mark.parametrize("size", [Size.W, Size.DW])
def test_operations(size: Size) -> None:
    check_atomics(pieces, size)
