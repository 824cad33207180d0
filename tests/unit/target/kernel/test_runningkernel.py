"""What is said of names that the kernel has not, has several times, or has elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.errors import TargetError
from dprobes.target.kernel import runningkernel
from dprobes.target.kernel.kallsyms import Kallsyms
from dprobes.target.kernel.runningkernel import RunningKernel, module_name

if TYPE_CHECKING:
    from pathlib import Path

DATA = b"".join(b"ffffffff82%06x D data_%d\n" % (n, n) for n in range(600))
CODE = b"""ffffffff81000000 T _text
ffffffff81000040 t helper
ffffffff81000100 T kernel_clone
ffffffff81000180 t helper
ffffffff81000200 T __x64_sys_getpid
"""
KERNEL = RunningKernel(Kallsyms(CODE + DATA + b"ffffffffc0101000 t dummy_xmit\t[dummy]\n"))


@pytest.mark.parametrize(("former", "present"), [("do_fork", "kernel_clone"), ("sys_getpid", "__x64_sys_getpid")])
def test_former_names(former: str, present: str) -> None:
    assert KERNEL.symbol(former, "", is_code=True).name == present
    with pytest.raises(TargetError) as caught:
        KERNEL.symbol(former, "")
    assert caught.value.message == f"the kernel has no symbol '{former}'"
    assert caught.value.hint == f"it is called '{present}' in this kernel"


def test_data_that_is_no_more_has_no_other_name() -> None:
    with pytest.raises(TargetError) as caught:
        KERNEL.symbol("nr_free_pages", "")
    assert caught.value.message == "the kernel has no symbol 'nr_free_pages'"
    assert caught.value.hint == (
        "pages are counted in arrays today: 'vm_zone_stat' has the sums, less what each CPU has not added yet, and "
        "begins with the free pages"
    )


def test_a_name_of_several_places() -> None:
    with pytest.raises(TargetError) as caught:
        KERNEL.symbol("helper", "")
    assert caught.value.message == "'helper' stands for 2 places in the kernel, at offsets 0x40, 0x180"
    assert caught.value.hint == "write the one that is meant as a number: offset = 0x40"


def test_a_name_of_another_module() -> None:
    with pytest.raises(TargetError) as caught:
        KERNEL.symbol("dummy_xmit", "")
    assert caught.value.message == "'dummy_xmit' is not in the kernel but in the module 'dummy'"
    assert caught.value.hint == "write 'name = dummy' and 'modtype = kmod'"


def test_a_name_of_which_there_are_clones_only() -> None:
    kernel = RunningKernel(Kallsyms(CODE + b"ffffffff81000300 t pick_next.isra.0\nffffffff81000340 t pick_next.cold\n"))
    with pytest.raises(TargetError) as caught:
        kernel.symbol("pick_next", "", is_code=True)
    assert caught.value.message == (
        "the kernel has no symbol 'pick_next', but what the compiler made of it: 'pick_next.isra.0', 'pick_next.cold'"
    )
    assert caught.value.hint == (
        "write 'pick_next.isra.0'; arguments that it does not need may be left out, and the others moved up"
    )


def test_an_unknown_name_and_near_ones() -> None:
    with pytest.raises(TargetError) as caught:
        KERNEL.symbol("kernel_clnoe", "")
    assert caught.value.message == "the kernel has no symbol 'kernel_clnoe'"
    assert caught.value.hint == "did you mean 'kernel_clone'?"


def test_a_list_without_data_is_named() -> None:
    with pytest.raises(TargetError) as caught:
        RunningKernel(Kallsyms(CODE)).symbol("jiffies", "")
    assert caught.value.hint == "of data /proc/kallsyms has no names: the kernel was built without CONFIG_KALLSYMS_ALL"


def test_hidden_addresses_are_an_error() -> None:
    with pytest.raises(TargetError) as caught:
        RunningKernel(Kallsyms(b"0000000000000000 T _text\n")).symbol("_text", "")
    assert caught.value.message == "the kernel hides its addresses: /proc/kallsyms shows 0 for all of them"
    assert caught.value.hint is not None


@pytest.mark.parametrize(
    ("name", "module"), [("ext4", "ext4"), ("snd-pcm.ko", "snd_pcm"), ("/lib/modules/x/e1000.ko.xz", "e1000")]
)
def test_names_of_modules(name: str, module: str) -> None:
    assert module_name(name) == module


def test_places_have_names() -> None:
    assert KERNEL.name_of(0xFFFFFFFF81000104) == "kernel_clone+0x4"
    assert KERNEL.name_of(0xFFFFFFFF81000100) == "kernel_clone"


@pytest.mark.parametrize("name", ["available_filter_functions_addrs", "available_filter_functions"])
def test_what_ftrace_reaches_is_known_by_addresses_or_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["kernel_clone", "__x64_sys_getpid", "dummy_xmit [dummy]"]
    places = ["ffffffff81000100", "ffffffff81000204", "ffffffffc0101004"]  # some behind an endbr64
    if name.endswith("addrs"):
        lines = [f"{place} {line}" for place, line in zip(places, lines, strict=True)]
    (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    monkeypatch.setattr(runningkernel, "_TRACING", (tmp_path / "missing", tmp_path))
    kernel = RunningKernel(Kallsyms(CODE + b"ffffffffc0101000 t dummy_xmit\t[dummy]\n"))
    addresses = (0xFFFFFFFF81000040, 0xFFFFFFFF81000100, 0xFFFFFFFF81000200, 0xFFFFFFFFC0101000)
    assert [kernel.is_traceable(address) for address in addresses] == [False, True, True, True]


def test_what_ftrace_reaches_may_be_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runningkernel, "_TRACING", (tmp_path,))
    assert RunningKernel(Kallsyms(CODE)).is_traceable(0xFFFFFFFF81000100) is None


def test_the_blacklist_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = [(0x300, 0x400, "big"), (0x100, 0x110, "one"), (0x320, 0x330, "within"), (0x110, 0x120, "next")]
    path = tmp_path / "blacklist"
    path.write_text("".join(f"0x{start:016x}-0x{end:016x}\t{name}\n" for start, end, name in ranges))
    monkeypatch.setattr(runningkernel, "_BLACKLIST", path)
    kernel = RunningKernel(Kallsyms(CODE))
    expected = {0xFF: False, 0x100: True, 0x11F: True, 0x120: False, 0x300: True, 0x3FF: True, 0x400: False}
    assert {address: kernel.is_blacklisted(address) for address in expected} == expected
