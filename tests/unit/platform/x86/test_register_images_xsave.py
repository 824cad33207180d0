"""Floating-point registers out of images of the two formats, and what stands for a component in its initial state."""

from __future__ import annotations

import pytest

from dprobes.arch import architecture
from dprobes.platform.x86.register_images import FloatingPoint

REGISTERS = {r.name: r.index for r in architecture("x86_64").registers}
X87, SSE, AVX = 1, 2, 4


def image(components: int | None) -> bytes:
    """Return an image full of values, with the header of XSAVE unless ``components`` is None."""
    data = bytearray(n * 5 & 0xFF for n in range(512))
    data[2:6] = (0x3800).to_bytes(2, "little") + bytes([0x80, 0])  # top is 7, and register 7 is used
    if components is None:
        return bytes(data)
    return bytes(data) + components.to_bytes(8, "little") + bytes(56) + bytes(range(256))


def value(data: bytes, name: str) -> int:
    return FloatingPoint(data).register(REGISTERS[name])


def part(data: bytes, offset: int, size: int) -> int:
    return int.from_bytes(data[offset : offset + size], "little")


@pytest.mark.parametrize("components", [X87 | SSE | AVX, X87 | SSE, SSE, AVX, X87, 0, None])
def test_what_is_in_its_initial_state_is_not_looked_at(components: int | None) -> None:
    data = image(components)
    there = X87 | SSE if components is None else components
    x87, sse, avx = there & X87, there & SSE, there & AVX
    assert value(data, "fcw") == (part(data, 0, 2) if x87 else 0x37F)
    assert value(data, "fsw") == (0x3800 if x87 else 0)
    assert value(data, "fip") == (part(data, 8, 8) if x87 else 0)
    assert value(data, "fdp") == (part(data, 16, 8) if x87 else 0)
    assert value(data, "fr0") == (part(data, 32, 10) if x87 else 0)
    assert value(data, "fr7") == (part(data, 144, 10) if x87 else 0)
    assert value(data, "mxcsr") == (part(data, 24, 4) if sse or avx else 0x1F80)
    for number in (0, 7, 8, 15):
        low = part(data, 160 + 16 * number, 16) if sse else 0
        high = part(data, 576 + 16 * number, 16) if avx else 0
        assert value(data, f"xmm{number}") == low
        assert value(data, f"ymm{number}") == low | high << 128
    assert value(data, "fcs") == value(data, "fds") == 0


@pytest.mark.parametrize(
    ("number", "tag"),
    [
        (0, 1),
        (1 << 79, 1),
        (1, 2),
        (0x3FFF << 64 | 1 << 63, 0),
        (0x3FFF << 64, 2),
        (0x7FFF << 64 | 1 << 63, 2),
        (0x7FFF << 64 | 3 << 62, 2),
    ],
    ids=["zero", "minus zero", "denormal", "one", "unnormal", "infinity", "not a number"],
)
def test_the_tag_word_tells_what_registers_hold(number: int, tag: int) -> None:
    data = bytearray(image(X87))
    data[32:42] = number.to_bytes(10, "little")
    # Top is 7: st0 is register 7, and all others are empty.
    assert value(bytes(data), "ftw") == 0x3FFF | tag << 14


def test_the_tag_word_of_an_unused_unit_says_empty() -> None:
    assert value(image(0), "ftw") == 0xFFFF
