"""
A sample extension: ``callk fingerprint`` ( length address -- hash ).

It pops an address and a length below it, and pushes the 32-bit FNV-1a hash of that memory: enough to see whether two
buffers are equal, without logging what is in them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.bpf_instructions import Alu, Jump
from dprobes.extensions import Extension

if TYPE_CHECKING:
    from dprobes.bpf.lower import Composer
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


def _compile(code: Composer) -> None:
    """Write the same for the kernel, which runs what is written here at each hit."""
    address, length = code.pop(), code.pop()
    with code.when(Jump.JGT, length, _MAX):
        code.set(length, _MAX)
    value, byte = code.variable(_BASIS), code.variable()
    with code.loop() as end:
        code.leave_if(end, Jump.JEQ, length, 0)
        code.read_into(byte, address, 1)
        code.calculate(Alu.XOR, value, byte)
        code.calculate(Alu.MUL, value, _PRIME)
        code.calculate(Alu.AND, value, 0xFFFFFFFF)
        code.calculate(Alu.ADD, address, 1)
        code.calculate(Alu.SUB, length, 1)
    code.push(value)


fingerprint = Extension(interpret=_interpret, compile=_compile)
