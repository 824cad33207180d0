"""Conversions of printf as place-holders of templates."""

from __future__ import annotations

import pytest

from dprobes.dpc.types.ctype import CHAR, INT, Array, String
from dprobes.dpc.types.printformat import Form, conversions, placeholder


@pytest.mark.parametrize(
    ("conversion", "expected"), [("%s", "%*s"), ("%.8s", "%*.8s"), ("%h", "%*h"), ("%v", "%*h"), ("%d", None)]
)
def test_bytes_are_shown_as_a_dump_or_as_text(conversion: str, expected: str | None) -> None:
    ((found,), _) = conversions(conversion)
    assert placeholder(found, Array(CHAR, None), Form.RAW) == expected


def test_numbers_are_no_text() -> None:
    ((found,), _) = conversions("%s")
    assert placeholder(found, INT, Form.RAW) is None
    assert placeholder(found, String(8), Form.RAW) == "%*s"
