"""Names of code in parts and as text."""

from __future__ import annotations

import pytest

from dprobes.target.code_names import CodeName, InlinedCode, LocatedCode, LocatedFunction, MappedCode, function_at
from dprobes.target.module_lookup import find_module
from dprobes.target.probed_module import Module


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (CodeName("malloc", 0, "libc.so.6"), "malloc [libc.so.6]"),
        (CodeName("malloc", 20, "libc.so.6"), "malloc+0x14 [libc.so.6]"),
        (CodeName("", 0x1234, "libc.so.6"), "libc.so.6+0x1234"),
    ],
)
def test_text(name: CodeName, text: str) -> None:
    assert name.text == text


def test_a_place_names_the_addresses_around_it() -> None:
    mapped = MappedCode(0x7000, 0x9000, 0x1000, "lib.so", "")
    located = LocatedCode(1, 0, mapped, LocatedFunction(0x1100, 0x1200, "f"))
    assert located.name_of(0x7180) == CodeName("f", 0x80, "lib.so")
    assert located._replace(function=None).name_of(0x7180) == CodeName("", 0x1180, "lib.so")


def test_inlined_calls_are_named_from_the_inside() -> None:
    mapped = MappedCode(0x7000, 0x9000, 0x1000, "lib.so", "")
    inlined = (InlinedCode(0x1110, 0x1140, "outer"), InlinedCode(0x1120, 0x1130, "inner"))
    located = LocatedCode(1, 0, mapped, LocatedFunction(0x1100, 0x1200, "f", inlined))
    assert located.name_of(0x7125).inlined == ("inner", "outer")
    assert located.name_of(0x7135).inlined == ("outer",)
    assert located.name_of(0x7100).inlined == ()
    assert located.name_of(0x7125).text == "f+0x25 [lib.so]"


def test_a_function_is_found_with_its_extent() -> None:
    path = find_module("libc.so.6")
    assert path is not None
    module = Module.load(path)
    (symbol,) = module.symbols.lookup("getpid")
    start = module.file_offset(symbol.address)
    found = function_at(module, start + 2)
    assert found == LocatedFunction(start, start + symbol.size, "getpid")
    assert function_at(module, 0) is None
