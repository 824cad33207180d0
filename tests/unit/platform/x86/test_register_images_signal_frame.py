"""Signal frames: what of the floating-point state they may hold."""

from __future__ import annotations

from dprobes.platform.x86.register_images import TILE_DATA, restorable

TILES = 2816
USUAL = 0x200E7
"""x87, SSE, AVX, the three parts of AVX-512, and the configuration of tiles."""


def image(in_use: int) -> bytes:
    features = (USUAL | 1 << TILE_DATA).to_bytes(8, "little")
    data = bytearray(range(256)) * 43
    data[464:472] = features
    data[512:520] = in_use.to_bytes(8, "little")
    return bytes(data)


def test_tiles_that_a_thread_does_not_use_are_left_out() -> None:
    before = image(in_use=7)
    after = restorable(before, TILES)
    assert after == before[:464] + USUAL.to_bytes(8, "little") + before[472:TILES]


def test_tiles_that_are_in_use_stay() -> None:
    before = image(in_use=7 | 1 << TILE_DATA)
    assert restorable(before, TILES) == before


def test_a_processor_without_tiles_needs_nothing() -> None:
    before = image(in_use=7)
    assert restorable(before, 0) == before
