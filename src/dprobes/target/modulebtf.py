"""
BTF of the kernel's modules: what a module adds to the types of the kernel.

Numbers of types and places of strings go on where those of the kernel end (Documentation/bpf/btf.rst, "split BTF"): so
the types of both, one behind the other, are one BTF::

    header | types of the kernel | types of the module | strings of the kernel | strings of the module
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from dprobes.errors import FormatError, TargetError
from dprobes.target.btf import Btf

if TYPE_CHECKING:
    from dprobes.target.btf import Kind

__all__ = ["ModuleBtf"]

_HEADER = struct.Struct("<HBBIIIII")


class ModuleBtf(Btf):
    """
    Look up types of a module, or else of the kernel, in the bytes of both.

    Raises ``FormatError`` if one of them is no BTF.
    """

    def __init__(self, kernel: bytes, module: bytes) -> None:
        Btf(kernel).close()  # both are well-formed, each by itself
        Btf(module).close()
        magic, version, flags, length, *_ = _HEADER.unpack_from(kernel)
        types, strings = (b"".join(parts) for parts in zip(_parts(kernel), _parts(module), strict=True))
        header = _HEADER.pack(magic, version, flags, _HEADER.size, 0, len(types), len(types), len(strings))
        assert length >= _HEADER.size
        super().__init__(header + types + strings)

    def find(self, kind: Kind, name: str) -> int:
        """Return the id of the last type of a kind and name: that of the module, if it has one."""
        found = 0
        for place in self._places_of_name(name):
            if (number := self._type_at(place)) and self._kind(number) is kind:
                found = number
        if not found:
            raise TargetError(f"the type information of the module and of the kernel has no {kind.name} '{name}'")
        return found


def _parts(data: bytes) -> tuple[bytes, bytes]:
    """Return the types and the strings of BTF."""
    *_, length, types, types_size, strings, strings_size = _HEADER.unpack_from(data)
    start, end = length + types, length + strings
    if start + types_size > len(data):
        raise FormatError("the sections of BTF do not lie in its data")
    return data[start : start + types_size], data[end : end + strings_size]
