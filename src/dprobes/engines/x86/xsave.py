"""
The floating-point and vector registers of a thread, out of the image that XSAVE makes of them.

The standard format (Intel SDM, volume 1, 10.5.1 and 13.4)::

      0  fcw | 2  fsw | 4  abridged ftw | 8  fip (64 bits) | 16  fdp (64 bits) | 24  mxcsr
     32  st0 ... st7, 16 bytes each, 10 of them used
    160  xmm0 ... xmm15, 16 bytes each
    512  the components that are not in their initial state: bit 0 x87, bit 1 SSE, bit 2 AVX
      ?  the upper halves of ymm0 ... ymm15, where CPUID says

A component in its initial state is not looked at: what stands in its place means nothing. FXSAVE makes the first 512
bytes only.
"""

from __future__ import annotations

from functools import cache

from dprobes.engines.x86 import cpuid

__all__ = ["FloatingPoint"]

_X87, _SSE, _AVX = 1, 2, 4
_HEADER = 512
_STATE_LEAF, _AVX_SUBLEAF = 0xD, 2
_USUAL_AVX_OFFSET = 576

_INITIAL_FCW = 0x37F
_INITIAL_MXCSR = 0x1F80

# Indices in appendix A.
_FR, _FCW, _FSW, _FTW, _FIP, _FDP = range(0x3E, 0x46), 0x46, 0x47, 0x48, 0x49, 0x4B
_XMM, _MXCSR, _XMM_HIGH, _YMM = range(0x4D, 0x55), 0x55, range(0x68, 0x70), range(0x70, 0x80)

# Offset and size. A 64-bit kernel saves the whole of both addresses and so no fcs and fds, which read as 0.
_PLACES = {_FCW: (0, 2), _FSW: (2, 2), _FIP: (8, 8), _FDP: (16, 8)}

_EMPTY, _VALID, _ZERO, _SPECIAL = 3, 0, 1, 2


class FloatingPoint:
    """Hold the registers in an image."""

    def __init__(self, image: bytes) -> None:
        self._image = image
        self._components = self._number(_HEADER, 8) if len(image) > _HEADER else _X87 | _SSE

    def register(self, index: int) -> int:
        """Return the register with this index of the appendix; 0 for any that is none of these."""
        if index in _YMM:
            number = index - _YMM.start
            return self._xmm(number) | self._upper_half(number) << 128
        if index in _XMM:
            return self._xmm(index - _XMM.start)
        if index in _XMM_HIGH:
            return self._xmm(index - _XMM_HIGH.start + 8)
        if index == _MXCSR:
            return self._number(24, 4) if self._components & (_SSE | _AVX) else _INITIAL_MXCSR
        return self._x87(index)

    def _x87(self, index: int) -> int:
        if not self._components & _X87:
            return {_FCW: _INITIAL_FCW, _FTW: 0xFFFF}.get(index, 0)
        if index in _FR:
            return self._number(32 + 16 * (index - _FR.start), 10)
        if index == _FTW:
            return self._tags()
        offset, size = _PLACES.get(index, (0, 0))
        return self._number(offset, size)

    def _tags(self) -> int:
        """Return the tag word as FSTENV stores it: two bits for each physical register (volume 1, 8.1.7)."""
        top = self._number(2, 2) >> 11 & 7
        used = self._number(4, 1)
        tags = 0
        for physical in range(8):
            tag = self._tag(physical - top & 7) if used >> physical & 1 else _EMPTY
            tags |= tag << 2 * physical
        return tags

    def _tag(self, number: int) -> int:
        value = self._number(32 + 16 * number, 10)
        exponent, fraction = value >> 64 & 0x7FFF, value & (1 << 64) - 1
        if exponent == 0:
            return _SPECIAL if fraction else _ZERO
        return _VALID if exponent != 0x7FFF and fraction >> 63 else _SPECIAL

    def _xmm(self, number: int) -> int:
        return self._number(160 + 16 * number, 16) if self._components & _SSE else 0

    def _upper_half(self, number: int) -> int:
        return self._number(_avx_offset() + 16 * number, 16) if self._components & _AVX else 0

    def _number(self, offset: int, size: int) -> int:
        return int.from_bytes(self._image[offset : offset + size], "little")


@cache
def _avx_offset() -> int:
    """Return where the images of this processor have the upper halves of the ymm registers."""
    try:
        return cpuid.cpuid(_STATE_LEAF, _AVX_SUBLEAF)[1]
    except OSError:
        return _USUAL_AVX_OFFSET
