"""What is said of names that the kernel has not, has several times, or has elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.errors import TargetError
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.kernel import kernel_files, running_kernel
from dprobes.target.kernel.kernel_files import module_name
from dprobes.target.kernel.kernel_symbols import Kallsyms
from dprobes.target.kernel.running_kernel import RunningKernel
from unit.target.conftest import Toolbox

if TYPE_CHECKING:
    from pathlib import Path

DATA = b"".join(b"ffffffff82%06x D data_%d\n" % (n, n) for n in range(600))
CODE = b"""ffffffff81000000 T _text
ffffffff81000040 t helper
ffffffff81000100 T kernel_clone
ffffffff81000180 t helper
ffffffff81000200 T __x64_sys_getpid
"""
BUILD = ("gcc", "-O1", "-fno-toplevel-reorder", "-nostdlib", "-static", "-Wl,-e,_text")
TWICE = """
static __attribute__((noipa)) int helper(int n) { return n + 1; }
int NAME(int n) { return helper(n); }
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


@pytest.fixture
def no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of the kernel's debug information."""
    monkeypatch.setattr(kernel_files, "described_kernel", lambda: None)


@pytest.mark.usefixtures("no_file")
def test_a_name_of_several_places() -> None:
    with pytest.raises(TargetError) as caught:
        KERNEL.symbol("helper", "")
    assert caught.value.message == (
        "'helper' is the name of 2 places in the kernel, at offsets 0x40 (after '_text'), 0x180 (after 'kernel_clone')"
    )
    assert caught.value.hint == (
        "write the intended one as 'offset = \"helper,1\"', or all as a pattern, 'offset = \"*:helper\"'; debug "
        "information of the kernel would show their source files"
    )


def test_a_name_of_several_places_with_their_source_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "vmlinux"
    (tmp_path / "one.c").write_text("int _text(void) { return 0; }" + TWICE.replace("NAME", "first"))
    (tmp_path / "two.c").write_text(TWICE.replace("NAME", "second"))
    Toolbox(tmp_path).run(*BUILD, "one.c", "two.c", "-o", path)
    elf = ElfFile.open(path)
    monkeypatch.setattr(kernel_files, "described_kernel", lambda: elf)
    listed = Toolbox(tmp_path).run("nm", "-n", path).splitlines()
    moved = 0x7F00_0000
    lines = [f"{int(line[:16], 16) + moved:016x}{line[16:]}\n" for line in listed]
    start, *places = (int(line[:16], 16) for line in listed if line.split()[2] in ("_text", "helper"))
    with pytest.raises(TargetError) as caught:
        RunningKernel(Kallsyms("".join(lines).encode())).symbol("helper", "", is_code=True)
    first, second = (place - start for place in places)
    assert caught.value.message == (
        f"'helper' is the name of 2 places in the kernel, at offsets {first:#x} (one.c, after '_text'), "
        f"{second:#x} (two.c, after 'first')"
    )
    assert caught.value.hint == (
        "write the intended one as 'offset = \"one.c:helper\"', or all as a pattern, 'offset = \"*:helper\"'"
    )


@pytest.mark.usefixtures("no_file")
def test_all_of_several_places_are_named() -> None:
    lines = [f"ffffffff8100{n:02x}00 {'Tt'[n % 2]} {'twice' if n % 2 else f'known_{n}'}\n" for n in range(1, 40)]
    with pytest.raises(TargetError) as caught:
        RunningKernel(Kallsyms(CODE.splitlines(keepends=True)[0] + "".join(lines).encode())).symbol("twice", "")
    assert caught.value.message.startswith(
        "'twice' is the name of 20 places in the kernel, at offsets 0x100 (after '_text')"
    )
    assert caught.value.message.endswith(", 0x1f00 (after 'known_30') and 4 more")


def test_code_that_is_no_more_or_never_runs_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(running_kernel, "_BLACKLIST", tmp_path / "blacklist")
    head, clone, *rest = CODE.partition(b"ffffffff81000100")
    padding = b"ffffffff810000f0 T __pfx_kernel_clone\n"
    start = b"ffffffff82000000 T _sinittext\nffffffff82000100 T start_kernel\nffffffff82000200 T _einittext\n"
    kernel = RunningKernel(Kallsyms(b"".join((head, padding, clone, *rest, start))))
    given_back = "the kernel has executed it when it started, and given its memory back (__init)"
    assert kernel.refusal(0xFFFFFFFF82000100) == given_back
    assert kernel.refusal(0xFFFFFFFF820001FF) == given_back
    assert kernel.refusal(0xFFFFFFFF82000200) is None
    assert kernel.refusal(0xFFFFFFFF810000F0) == "it is the space before 'kernel_clone', and never executed"
    assert kernel.refusal(0xFFFFFFFF81000100) is None


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
        "the kernel has no symbol 'pick_next', but variants that the compiler made: 'pick_next.isra.0', "
        "'pick_next.cold'"
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
    monkeypatch.setattr(running_kernel, "_TRACING", (tmp_path / "missing", tmp_path))
    kernel = RunningKernel(Kallsyms(CODE + b"ffffffffc0101000 t dummy_xmit\t[dummy]\n"))
    addresses = (0xFFFFFFFF81000040, 0xFFFFFFFF81000100, 0xFFFFFFFF81000200, 0xFFFFFFFFC0101000)
    assert [kernel.is_traceable(address) for address in addresses] == [False, True, True, True]


def test_what_ftrace_reaches_may_be_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_kernel, "_TRACING", (tmp_path,))
    assert RunningKernel(Kallsyms(CODE)).is_traceable(0xFFFFFFFF81000100) is None


def test_the_blacklist_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = [(0x300, 0x400, "big"), (0x100, 0x110, "one"), (0x320, 0x330, "within"), (0x110, 0x120, "next")]
    path = tmp_path / "blacklist"
    path.write_text("".join(f"0x{start:016x}-0x{end:016x}\t{name}\n" for start, end, name in ranges))
    monkeypatch.setattr(running_kernel, "_BLACKLIST", path)
    kernel = RunningKernel(Kallsyms(CODE))
    expected = {0xFF: False, 0x100: True, 0x11F: True, 0x120: False, 0x300: True, 0x3FF: True, 0x400: False}
    assert {address: kernel.is_blacklisted(address) for address in expected} == expected
