"""Kernels and modules as files: what is made by the compiler here has what tells them from other programs."""

from __future__ import annotations

import lzma
import re
import struct
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import TargetError
from dprobes.target.code.machine_code import decode
from dprobes.target.kernel.kernel_image import KernelFile
from unit.target.conftest import Toolbox

if TYPE_CHECKING:
    from pathlib import Path

KERNEL = """
__asm__(".text\\n.globl _text\\n_text: nop\\n.globl entry_label\\nentry_label: nop\\n");
__attribute__((noipa)) static int inner(int x) { return x + 1; }
int vfs_read(int x) { return inner(x) * 2; }
const char linux_banner[] = "Linux version 1.2.3 (made here)";
int jiffies = 5;
__asm__(".globl per_cpu_count\\n.set per_cpu_count, 0x1f000\\n");
__asm__(".pushsection .bss\\n.globl _end\\n_end:\\n.popsection\\n");
"""
MODULE = """
int count;
static volatile int ready = 3;
__attribute__((section(".init.text"))) int start(void) { return count; }
__attribute__((noipa)) int transmit(int x) { return x + ready + count++; }
"""
LINKED = ("-nostdlib", "-static", "-no-pie", "-mcmodel=kernel", "-fno-pic", "-Wl,-e,_text", "-Wl,--build-id=0x1234abcd")
START = "-Wl,-Ttext=0xffffffff81000000"


@pytest.fixture
def toolbox(tmp_path: Path) -> Toolbox:
    return Toolbox(tmp_path)


@pytest.fixture
def vmlinux(toolbox: Toolbox) -> Path:
    return toolbox.build("vmlinux-1.2.3", {"kernel.c": KERNEL}, *LINKED, START)


@pytest.fixture
def module(toolbox: Toolbox) -> Path:
    return toolbox.build("dummy.ko", {"dummy.c": MODULE}, "-r", "-nostdlib", "-fno-pic", "-Wl,--build-id=0x77")


@pytest.fixture
def image(toolbox: Toolbox, vmlinux: Path) -> Path:
    """Return the kernel as a boot loader gets it: stripped, compressed, behind the code that unpacks it."""
    toolbox.run("strip", "-o", "stripped", vmlinux)
    payload = lzma.compress((toolbox.directory / "stripped").read_bytes()) + bytes(4)
    setup = bytearray(2 * 512)
    setup[0x1F1] = 1
    setup[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", setup, 0x248, 16, len(payload))
    path = toolbox.directory / "vmlinuz-1.2.3"
    path.write_bytes(bytes(setup) + bytes(16) + payload)
    return path


def system_map(toolbox: Toolbox, vmlinux: Path) -> str:
    return "".join(
        f"{line}\n" for line in toolbox.run("nm", "-n", vmlinux).splitlines() if re.match(r"[0-9a-f]+ ", line)
    )


def test_a_kernel_with_symbols(vmlinux: Path) -> None:
    file = KernelFile(vmlinux, "")
    kernel = file.kernel()
    assert file.identity == "1234abcd"
    ((name, start, size),) = file.areas
    assert (name, start, start + size) == ("_text", 0xFFFFFFFF81000000, kernel.symbol("_end", "").address)
    assert kernel.base_of("") == start
    assert kernel.symbol("per_cpu_count", "").address == 0x1F000
    assert [kernel.symbol(name, "").letter for name in ("inner", "vfs_read", "jiffies", "entry_label")] == list("tTDT")
    read = kernel.symbol("vfs_read", "").address
    assert kernel.name_of(read + 1) == "vfs_read+0x1"
    assert "call" in [each.mnemonic for each in decode(kernel.text.read(read, 16), 64, read)]
    assert kernel.text.read(kernel.symbol("linux_banner", "").address, 13) == b"Linux version"
    assert kernel.text.read(0xFFFFFFFF80000000, 4) == b""
    assert (kernel.is_traceable(read), kernel.is_blacklisted(read)) == (None, False)


def test_an_image_has_its_symbols_in_a_system_map(toolbox: Toolbox, vmlinux: Path, image: Path) -> None:
    with pytest.raises(TargetError) as caught:
        KernelFile(image, "")
    beside = toolbox.directory / "System.map-1.2.3"
    assert caught.value.message == (
        f"'{image}' has no symbols, and there is no file with them (/usr/lib/debug/boot/vmlinux-1.2.3, {beside})"
    )
    assert caught.value.hint == ("install the kernel's debug package, or name a System.map or vmlinux with --sym FILE")
    beside.write_text("ffffffffffffffff B The real System.map is in the linux-image-<version>-dbg package\n")
    with pytest.raises(TargetError, match="has no symbols"):
        KernelFile(image, "")
    beside.write_text(system_map(toolbox, vmlinux))
    file = KernelFile(image, "")
    plain = KernelFile(vmlinux, "")
    assert (file.identity, file.areas) == (plain.identity, plain.areas)
    assert file.kernel().symbol("vfs_read", "").address == plain.kernel().symbol("vfs_read", "").address
    assert KernelFile(image, "", vmlinux).areas == plain.areas


def test_symbols_of_another_kernel_are_refused(toolbox: Toolbox, vmlinux: Path, image: Path) -> None:
    listing = toolbox.directory / "other.map"
    listing.write_text(re.sub(r"\S+( R linux_banner)", r"ffffffff81000000\1", system_map(toolbox, vmlinux)))
    with pytest.raises(TargetError) as caught:
        KernelFile(image, "", listing)
    assert (
        caught.value.message == f"'{listing}' does not belong to '{image}': 'linux_banner' is not at the listed address"
    )
    listing.write_text("nothing\n")
    with pytest.raises(TargetError) as caught:
        KernelFile(image, "", listing)
    assert caught.value.message == f"'{listing}' is not a list of a kernel's symbols: it has no '_text'"
    other = toolbox.build("other", {"kernel.c": KERNEL}, *LINKED[:-1], "-Wl,--build-id=0x9999", START)
    with pytest.raises(TargetError) as caught:
        KernelFile(image, "", other)
    assert caught.value.message == (
        f"'{other}' does not belong to '{image}': its build-id is 9999, the kernel's 1234abcd"
    )


def test_a_module_has_areas_that_the_loader_places(module: Path) -> None:
    file = KernelFile(module, "dummy")
    kernel = file.kernel()
    assert file.identity == "77"
    names = [area.name for area in file.areas]
    assert names[0] == ".text"
    assert {".bss", ".data"} < set(names)
    assert ".init.text" not in names
    inside = {
        name: next(a.name for a in file.areas if 0 <= kernel.symbol(name, "dummy").address - a.address < a.size)
        for name in ("transmit", "count", "ready")
    }
    assert inside == {"transmit": ".text", "count": ".bss", "ready": ".data"}
    assert kernel.base_of("dummy") == file.areas[0].address
    with pytest.raises(TargetError, match="has no symbol 'start'"):
        kernel.symbol("start", "dummy")
    code = kernel.text.read(kernel.symbol("transmit", "dummy").address, 4)
    assert len(code) == 4


def test_a_file_of_another_kind_is_refused(toolbox: Toolbox, vmlinux: Path, module: Path) -> None:
    plain = toolbox.build("plain", {"kernel.c": KERNEL}, *LINKED[:-1], "-Wl,--build-id=none", START)
    for path, name, said in (
        (vmlinux, "dummy", f"'{vmlinux}' is a kernel, and the program is for the module 'dummy'"),
        (module, "", f"'{module}' is a module, and the program is for the kernel"),
        (plain, "", f"'{plain}' has no build-id, by which the kernel that runs is recognised"),
    ):
        with pytest.raises(TargetError) as caught:
            KernelFile(path, name)
        assert caught.value.message == said


def test_functions_of_one_name_are_shown_with_their_source_files(toolbox: Toolbox) -> None:
    other = "static volatile int late = 5;\n__attribute__((noipa)) static int helper(int x) { return x + late; }\n"
    sources = {
        "kernel.c": KERNEL + other + "int one(int x) { return helper(x); }",
        "more.c": f"{other}int two(int x) {{ return helper(x); }}",
    }
    path = toolbox.build("vmlinux-1.2.3", sources, *LINKED, START)
    with pytest.raises(TargetError) as caught:
        KernelFile(path, "").kernel().symbol("helper", "", is_code=True)
    assert re.search(
        r"at offsets 0x\w+ \(kernel\.c, after '\w+'\), 0x\w+ \(more\.c, after '\w+'\)$", caught.value.message
    )
