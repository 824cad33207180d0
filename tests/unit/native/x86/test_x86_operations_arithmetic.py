"""Calculations and comparisons do what RFC 9669 says, with all registers, compared with a model in Python."""

from __future__ import annotations

import pytest

from support.ebpf_model import check_calculations, check_comparisons
from support.ebpf_pieces import pieces

WIDE = pytest.mark.parametrize("wide", [True, False])


@WIDE
def test_calculations(*, wide: bool) -> None:
    check_calculations(pieces, wide=wide)


@WIDE
def test_comparisons(*, wide: bool) -> None:
    check_comparisons(pieces, wide=wide)
