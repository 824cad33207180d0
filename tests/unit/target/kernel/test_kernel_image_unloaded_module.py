"""A module that is not loaded, as its file shows it: names, places, code as it will be, and what takes no probe."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import TargetError
from dprobes.target.kernel.kernel_files import open_module_file
from dprobes.target.kernel.kernel_image import UnloadedModule, open_unloaded_module
from unit.target.conftest import Toolbox
from unit.target.kernel.modulewriter import ENDBR, FUNCTION, RETURN, module_bytes

if TYPE_CHECKING:
    from pathlib import Path

INIT = 1 << 30


@pytest.fixture
def module(tmp_path: Path) -> UnloadedModule:
    (tmp_path / "sample.ko").write_bytes(module_bytes())
    return UnloadedModule("sample", open_module_file(tmp_path / "sample.ko"))


@pytest.mark.parametrize(
    ("name", "address", "is_code"),
    [("first", 0, True), ("second", 16, True), ("begins", INIT, True), ("counter", 2 * INIT, False)],
)
def test_symbols(module: UnloadedModule, name: str, address: int, *, is_code: bool) -> None:
    symbol = module.symbol(name, "sample")
    assert (symbol.address, symbol.is_code) == (address, is_code)


def test_a_function_has_the_name_that_is_its_own(module: UnloadedModule) -> None:
    assert module.name_of(INIT + 4) == "begins+0x4"
    assert module.symbol("init_module", "sample").address == INIT


def test_unknown_and_ambiguous_names(module: UnloadedModule) -> None:
    with pytest.raises(TargetError) as caught:
        module.symbol("secnod", "sample")
    assert caught.value.message == "the module 'sample' has no symbol 'secnod'"
    assert caught.value.hint == "did you mean 'second'?"
    with pytest.raises(TargetError, match="'twice' is the name of 2 places in the module 'sample'"):
        module.symbol("twice", "sample")


def test_the_calls_of_ftrace_are_what_they_become(module: UnloadedModule) -> None:
    assert module.text.read(0, 64) == 2 * (ENDBR + bytes.fromhex("0f1f440000") + FUNCTION[9:]) + b"\x31\xc0" + RETURN
    assert module.text.read(INIT, 9) == ENDBR + bytes.fromhex("0f1f440000")


def test_what_the_loader_may_replace(module: UnloadedModule) -> None:
    assert [address for address in range(39) if module.is_changed_later(address)] == [11]


def test_the_kernel_takes_no_probe_where_ftrace_does_not_go(module: UnloadedModule) -> None:
    assert [module.refusal(address) for address in (0, 9, 16, INIT)] == [None] * 4
    refusal = "the kernel allows none where ftrace cannot redirect the function (it is not among its __mcount_loc)"
    assert module.refusal(34) == refusal


def test_anchors_are_names_of_one_symbol(module: UnloadedModule) -> None:
    anchors = [module.anchor(address, "sample") for address in (0, 9, 16, 34, INIT + 4)]
    assert anchors == [("first", 0), ("first", 9), ("second", 0), ("untraced", 2), ("begins", 4)]
    assert module.anchor(100, "sample") is None


def test_a_module_for_another_kernel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sample.ko").write_bytes(module_bytes(release="2.4.20"))
    with pytest.raises(TargetError) as caught:
        open_unloaded_module(str(tmp_path / "sample.ko"))
    assert caught.value.message.startswith(f"'{tmp_path}/sample.ko' is a module for Linux 2.4.20, and this is Linux ")
    assert caught.value.hint == "build the module for the kernel that runs"


def test_functions_of_one_name_are_shown_with_their_source_files(tmp_path: Path) -> None:
    begin = "int begin(int n) { return 2 * n; }"
    static = "static __attribute__((noipa)) int twice(int n) { return n; }\nint NAME(int n) { return twice(n); }"
    this = '__attribute__((section(".gnu.linkonce.this_module"))) int this_module[4];'
    sources = {
        "one.c": f"{begin}\n{static.replace('NAME', 'first')}",
        "two.c": f"{this}\n{static.replace('NAME', 'second')}",
    }
    path = Toolbox(tmp_path).build("sample.ko", sources, "-r")
    with pytest.raises(TargetError) as caught:
        UnloadedModule("sample", open_module_file(path)).symbol("twice", "sample", is_code=True)
    assert re.fullmatch(
        r"'twice' is the name of 2 places in the module 'sample', at offsets 0x\w+ \(one\.c\), 0x\w+ \(two\.c\)",
        caught.value.message,
    )
