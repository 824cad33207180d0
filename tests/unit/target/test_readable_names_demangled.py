"""Names of C++ and Rust for people, and those of C as they are."""

from __future__ import annotations

import subprocess

import pytest

from dprobes.target.readable_names import Demangler


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("malloc", "malloc"),
        ("_ZN4shop4Cart3addEi", "shop::Cart::add(int)"),
        ("_Z3foov.part.0", "foo() [clone .part.0]"),
        ("_ZN4core3fmt9Formatter3pad17h0123456789abcdefE", "core::fmt::Formatter::pad"),
        ("_RNvCs1234_7mycrate3foo", "mycrate::foo"),
        ("_RNvCs1234", "_RNvCs1234"),
        ("_Zebra", "_Zebra"),
        ("_Z3foov" + "v" * 5000, "_Z3foov" + "v" * 5000),
        ("_Z", "_Z"),
        ("_Z\udcff", "_Z\udcff"),
    ],
)
def test_a_name_is_that_which_people_write(symbol: str, name: str) -> None:
    assert Demangler().name_of(symbol) == name


def test_symbols_of_others_are_not_given_to_the_library() -> None:
    demangler = Demangler()
    assert demangler.name_of("_ZN4shop4Cart3addEi", is_trusted=False) == "_ZN4shop4Cart3addEi"
    assert demangler.name_of("_RNvCs1234_7mycrate3foo", is_trusted=False) == "mycrate::foo"


def test_names_of_the_cpp_library_are_those_of_binutils() -> None:
    path = "/usr/lib/x86_64-linux-gnu/libstdc++.so.6"
    listed = subprocess.run(["nm", "-D", "--defined-only", path], check=True, capture_output=True, text=True)
    symbols = [line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines()]
    symbols = [symbol for symbol in symbols if symbol.startswith("_Z")][::7]
    done = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True)
    demangler = Demangler()
    pairs = dict(zip(symbols, done.stdout.splitlines(), strict=True))
    # Of std::string and the like the library makes the short names that binutils takes apart.
    pairs = {symbol: name for symbol, name in pairs.items() if "std::basic_" not in name}
    assert len(pairs) > 300
    assert {symbol: demangler.name_of(symbol) for symbol in pairs} == pairs
