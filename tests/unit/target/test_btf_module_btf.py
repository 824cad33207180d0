# ruff: noqa: SIM300 - expected == actual
from __future__ import annotations

import struct

import pytest

from dprobes.errors import FormatError, TargetError
from dprobes.target.btf import Btf, Kind, ModuleBtf, encode_functions

KERNEL, NUMBERS = encode_functions(["work", "other"])
"""Type 1 is ``unsigned long long``, 2 a prototype without parameters, 3 and 4 are the functions."""


def split(kernel: bytes) -> bytes:
    """Return the BTF of a module: ``struct box { u64 size; }``, and ``struct box *work(u64 count)``."""
    start, first = struct.unpack_from("<II", kernel, 16)
    strings, places = b"", {"work": kernel.index(b"work") - 24 - start}  # what the kernel has is not there again
    for name in ("box", "size", "count"):
        places[name] = first + len(strings)
        strings += name.encode() + b"\0"
    words = [
        *(places["box"], Kind.STRUCT << 24 | 1, 8, places["size"], 1, 0),  # 5
        *(0, Kind.PTR << 24, 5),  # 6
        *(0, Kind.FUNC_PROTO << 24 | 1, 6, places["count"], 1),  # 7
        *(places["work"], Kind.FUNC << 24, 7),  # 8
    ]
    types = struct.pack(f"<{len(words)}I", *words)
    return struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(strings)) + types + strings


def test_types_of_a_module_go_on_behind_those_of_the_kernel() -> None:
    btf = ModuleBtf(KERNEL, split(KERNEL))
    assert 5 == btf.find(Kind.STRUCT, "box")
    assert [("size", 1, 0, 0)] == list(btf.members(5))
    assert "unsigned long long" == btf.type_name(1)
    assert NUMBERS[1] == btf.find(Kind.FUNC, "other")


def test_a_function_of_the_module_comes_before_one_of_the_kernel() -> None:
    btf = ModuleBtf(KERNEL, split(KERNEL))
    assert [("count", 1)] == btf.parameters("work")
    assert "struct box *" == btf.type_name(btf.result("work"))
    assert [] == Btf(KERNEL).parameters("work")


def test_what_neither_has_is_an_error() -> None:
    with pytest.raises(TargetError) as caught:
        ModuleBtf(KERNEL, split(KERNEL)).find(Kind.STRUCT, "crate")
    assert "the type information of the module and of the kernel has no STRUCT 'crate'" == caught.value.message


@pytest.mark.parametrize("size", [10, 30, 100])
def test_what_is_cut_off_is_no_btf(size: int) -> None:
    with pytest.raises(FormatError):
        ModuleBtf(KERNEL, split(KERNEL)[:size])
    with pytest.raises(FormatError):
        ModuleBtf(KERNEL[:size], split(KERNEL))
