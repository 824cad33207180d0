"""
A sample extension: ``callk fingerprint`` ( length address -- hash ).

It pops an address and a length below it, and pushes the 32-bit FNV-1a hash of that memory: enough to see whether two
buffers are equal, without logging what is in them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.extensions import Extension

if TYPE_CHECKING:
    from dprobes.extensions import View

__all__ = ["fingerprint", "fnv1a"]

_BASIS, _PRIME = 0x811C9DC5, 0x01000193
_MAX = 4096


def fnv1a(data: bytes) -> int:
    """Return the 32-bit FNV-1a hash of ``data``."""
    value = _BASIS
    for byte in data:
        value = (value ^ byte) * _PRIME & 0xFFFFFFFF
    return value


def _interpret(view: View) -> None:
    address, length = view.pop(), view.pop()
    # What cannot be read raises INVALID_ADDR in the handler, as after "push mem".
    view.push(fnv1a(view.read(address, min(length, _MAX))))


fingerprint = Extension(interpret=_interpret)
