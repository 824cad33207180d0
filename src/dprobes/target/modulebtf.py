"""
BTF of the kernel's modules: what a module adds to the types of the kernel.

Numbers of types and places of strings go on where those of the kernel end (Documentation/bpf/btf.rst, "split BTF"): so
the types of both, one behind the other, are one BTF::

    header | types of the kernel | types of the module | strings of the kernel | strings of the module
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.target.btf import Btf

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        magic, version, flags, *_ = _HEADER.unpack_from(kernel)
        parts = _parts(kernel), _parts(module)
        types, strings = (b"".join(each) for each in zip(*parts, strict=True))
        self._kernel_size = len(parts[0][0])
        header = _HEADER.pack(magic, version, flags, _HEADER.size, 0, len(types), len(types), len(strings))
        super().__init__(header + types + strings)

    def find(self, kind: Kind, name: str) -> int:
        """Return the id of the first type of a kind and name: that of the module, if it has one."""
        for number in self.all_of(kind, name):
            return number
        raise TargetError(f"the type information of the module and of the kernel has no {kind.name} '{name}'")

    def all_of(self, kind: Kind, name: str) -> Iterator[int]:
        """Give the ids of all types of a kind and name: those of the module, or else those of the kernel."""
        found = [
            (place, number)
            for place in self._places_of_name(name)
            if (number := self._type_at(place)) and self._kind(number) is kind
        ]
        own = [number for place, number in found if place >= self._kernel_size]
        yield from own or [number for _, number in found]


def _parts(data: bytes) -> tuple[bytes, bytes]:
    """Return the types and the strings of BTF."""
    *_, length, types, types_size, strings, strings_size = _HEADER.unpack_from(data)
    start, end = length + types, length + strings
    return data[start : start + types_size], data[end : end + strings_size]
