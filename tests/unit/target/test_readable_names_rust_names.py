"""Rust's names as people write them: those of another reader, and an end for whatever is written."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.target.readable_names import rust_name

PROGRAM = Path(__file__).parents[2] / "programs" / "names.rs"


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("_ZN4core3fmt9Formatter3pad17h0123456789abcdefE", "core::fmt::Formatter::pad"),
        ("_ZN4core3fmt9Formatter3pad17h0123456789abcdefE.llvm.123", "core::fmt::Formatter::pad"),
        ("_ZN55_$LT$alloc..vec..Vec$LT$T$GT$$u20$as$u20$core..Drop$GT$4drop17h0123456789abcdefE",
         "<alloc::vec::Vec<T> as core::Drop>::drop"),
        ("_ZN4core3fmt9Formatter3padE", None),
        ("_ZN99too_short17h0123456789abcdefE", None),
        ("_RNvCs1234_7mycrate3foo", "mycrate::foo"),
        ("_RNCNvCs1234_7mycrate3foo0B3_", "mycrate::foo::{closure#0}"),
        ("_RNCNvCs1234_7mycrate3foos_0B3_", "mycrate::foo::{closure#1}"),
        ("_RINvCs1234_7mycrate3fooReBh_E", None),
        ("_RINvCs1234_7mycrate3fooReAhj3_E", "mycrate::foo::<&str, [u8; 3]>"),
        ("_RINvCs1234_7mycrate3fooFG_RL0_hUKCxEuE", None),
        ("_RINvCs1234_7mycrate3fooFG_RL0_hxEuE", "mycrate::foo::<for<'a> fn(&'a u8, i64)>"),
        ("_RINvCs1234_7mycrate3fooFUKCxEzE", 'mycrate::foo::<unsafe extern "C" fn(i64) -> !>'),
        ("_RINvCs1234_7mycrate3fooDNtB2_5Shapep4Itemh EL_E", None),
        ("_RINvCs1234_7mycrate3fooDNtB2_5Shapep4ItemhEL_E", "mycrate::foo::<dyn mycrate::Shape<Item = u8>>"),
        ("_RINvCs1234_7mycrate3fooTEThETxOmEKb1_Kln5_Kc61_E",
         "mycrate::foo::<(), (u8,), (i64, *mut u32), true, -5, 'a'>"),
        ("_RNvC7mycrateu8gdel_5qa", "mycrate::gödel"),
        ("_RNvMs_C7mycrateNtB4_5Shape4area", "<mycrate::Shape>::area"),
        ("_RNvXs_C7mycratehNtB4_5Shape4area", "<u8 as mycrate::Shape>::area"),
        ("_R", None),
        ("_RN", None),
        ("_R1NvC1a1b", None),
        ("main", None),
    ],
)  # fmt: skip
def test_a_name_is_read(symbol: str, name: str | None) -> None:
    assert rust_name(symbol) == name


@given(st.text("NvCIEBKRLFGUDTASPOMXYZ_0123456789abchijlmpsuxyz", max_size=60))
def test_any_text_is_a_name_or_none(text: str) -> None:
    found = rust_name("_R" + text)
    assert found is None or len(found) <= 4096


def test_a_name_that_doubles_itself_again_and_again_is_none() -> None:
    symbol = "_RINvC1a1b" + "T" + "h" * 2
    place = len(symbol) - 2
    for _ in range(60):  # each pair refers to the one before twice
        begin = len(symbol) - 2
        back = f"B{chr(ord('a') + 0)}_"
        symbol += f"ET{back}{back}"
        assert begin >= place
    assert rust_name(symbol + "E" * 70) is None
    assert rust_name("_RINvC1a1b" + "T" * 5000) is None
    assert rust_name("_RNvC99999999999999999999a1b") is None


@pytest.mark.skipif(shutil.which("rustc") is None, reason="rustc is not installed")
@pytest.mark.parametrize("form", ["v0", "legacy"])
def test_names_of_a_program_are_those_of_binutils(tmp_path: Path, form: str) -> None:
    program = tmp_path / "names"
    # Other versions of the compiler have the old form as their default, or refuse to be asked for it.
    flags = ["-C", "symbol-mangling-version=v0"] if form == "v0" else []
    subprocess.run(["rustc", "-O", *flags, PROGRAM, "-o", program], check=True, capture_output=True, timeout=300)
    listed = subprocess.run(["nm", program], check=True, capture_output=True, text=True).stdout.splitlines()
    symbols = [line.split()[-1] for line in listed]
    symbols = [symbol for symbol in symbols if symbol.startswith("_R") or re.search(r"17h[0-9a-f]{16}E", symbol)]
    done = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True)
    assert len(symbols) > 300
    for symbol, text in zip(symbols, done.stdout.splitlines(), strict=True):
        # It tells the hashes, and the types of constants.
        expected = re.sub(r"::h[0-9a-f]{16}$|\[[0-9a-f]{8,16}\]|: [ui](size|\d+)\b", "", text)
        assert rust_name(symbol) == expected
