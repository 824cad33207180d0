"""Conversions of printf as place-holders of templates."""

from __future__ import annotations

import ctypes
import random

import pytest

from dprobes.dpc.types.c_types import CHAR, INT, Array, Enumeration, String, integer_of
from dprobes.dpc.types.print_formats import Form, conversions, placeholder
from unit.formatters.templates.support import formatted, item

MEMORY = 0
"""The token of an item that 'log mrf' logs."""


def c_prints(text: str, value: int) -> str:
    """Return what printf(3) makes of one number."""
    libc, buffer = ctypes.CDLL(None), ctypes.create_string_buffer(8192)
    libc.snprintf(buffer, len(buffer), text.encode(), ctypes.c_long(value))
    return buffer.value.decode()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("form", [Form.RAW, Form.BYTES])
def test_numbers_are_printed_as_by_the_c_library(form: Form, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(150):
        size = rng.choice((4, 8))
        letter = rng.choice("diuxXo")
        flags = "".join(rng.sample("-0+ #", rng.randrange(6)))
        width = rng.choice(("", str(rng.randrange(1, 30)), str(rng.randrange(81, 200))))
        precision = rng.choice(("", "", ".", f".{rng.randrange(25)}"))
        type_ = integer_of(size, is_signed=rng.random() < 0.5)
        value = type_.cut(rng.choice((0, 1, -1, rng.getrandbits(64), rng.randrange(-300, 300))))
        ((found,), _) = conversions(f"%{flags}{width}{precision}{letter}")
        holder = placeholder(found, type_, form)
        assert holder is not None
        data = (value & (1 << 8 * size) - 1).to_bytes(size, "little")
        written = f"%{flags}{width}{precision}{'l' * (size == 8)}{letter}"
        shown = formatted(f"%(n){holder[1:]}", data if form is Form.RAW else item(MEMORY, data))
        assert shown == c_prints(written, value), (written, value, holder)


@pytest.mark.parametrize("letter", "sSkhvITcpae")
def test_flags_of_numbers_do_nothing_elsewhere(letter: str) -> None:
    ((found,), _) = conversions(f"%-+ #0{letter}")
    assert found.layout == ""
    ((found,), _) = conversions(f"%-+ #012{letter}")
    assert found.layout == "-12"


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("is_signed", [True, False])
def test_a_value_of_an_enumeration_without_a_name_has_the_sign_of_its_type(size: int, is_signed: bool) -> None:
    ((found,), _) = conversions("%s")
    type_ = Enumeration("color", integer_of(size, is_signed=is_signed), {"RED": 1, "LAST": -1})
    holder = placeholder(found, type_, Form.RAW)
    assert holder is not None
    last, other = (1 << 8 * size) - 1, (1 << 8 * size) - 2
    texts = [formatted(holder, value.to_bytes(size, "little")) for value in (1, last, other)]
    assert texts == ["RED", "LAST", "-2" if is_signed else str(other)]


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
