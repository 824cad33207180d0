from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.kernel import kernel_files
from dprobes.target.kernel.kernel_files import described_kernel, described_module, sources_in_module
from unit.target.conftest import Toolbox

if TYPE_CHECKING:
    from pathlib import Path

MODULE = """
__attribute__((section(".gnu.linkonce.this_module"))) int this_module[4];
int begin(int n) { return this_module[n]; }
"""


def notes_of(path: Path, directory: Path) -> Path:
    """Return the notes of a file as the kernel shows them."""
    Toolbox(directory).run("objcopy", "-O", "binary", "--only-section=.note.gnu.build-id", path, "notes")
    return directory / "notes"


@pytest.mark.parametrize("place", ["boot/vmlinux-{}", "lib/modules/{}/vmlinux", "usr/lib/modules/{}/vmlinux"])
def test_the_debug_file_of_the_kernel_is_the_one_of_its_build(tmp_path: Path, pie: Path, place: str) -> None:
    notes = notes_of(pie, tmp_path)
    path = tmp_path / "debug" / place.format(os.uname().release)
    path.parent.mkdir(parents=True)
    path.write_text("no kernel")
    assert described_kernel(None, tmp_path / "debug", notes) is None
    path.write_bytes(pie.read_bytes())
    found = described_kernel(None, tmp_path / "debug", notes)
    assert found is not None
    assert path == found.path
    Toolbox(tmp_path).run("gcc", "-shared", "-Wl,--build-id=0x1234567890", "-x", "c", "/dev/null", "-o", "other")
    assert described_kernel(None, tmp_path / "debug", notes_of(tmp_path / "other", tmp_path)) is None
    assert described_kernel(None, tmp_path / "debug", tmp_path / "nothing") is None


def test_a_kernel_that_is_named_is_taken(tmp_path: Path, pie: Path) -> None:
    found = described_kernel(pie)
    assert found is not None
    assert pie == found.path
    (tmp_path / "vmlinuz").write_text("packed")
    assert described_kernel(tmp_path / "vmlinuz") is None


def test_the_file_of_a_module_is_the_one_of_the_build_that_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stock.c").write_text(MODULE)
    path = tmp_path / "stock.ko"
    Toolbox(tmp_path).run("gcc", "-r", "-Wl,--build-id", "stock.c", "-o", "stock.ko")
    own = ElfFile.open(path).build_id
    assert own is not None
    running = {"stock_goods": own}
    monkeypatch.setattr(kernel_files, "find_module_file", lambda _name: path)
    monkeypatch.setattr(kernel_files, "running_build_id", lambda name: running[name])
    found = described_module("stock-goods")
    assert found is not None
    assert path == found.path
    running["stock_goods"] = "1234"
    assert described_module("stock-goods") is None
    found = described_module("stock-goods", path)
    assert found is not None
    assert path == found.path


def test_a_module_without_a_file_has_none(tmp_path: Path) -> None:
    assert described_module("stock", tmp_path / "stock.ko") is None
    (tmp_path / "stock.ko").write_text("no module")
    assert described_module("stock", tmp_path / "stock.ko") is None


def test_source_files_of_functions_of_one_name_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module has no addresses yet: the kernel says where its sections are."""
    for file, section in (("one.c", ".text"), ("two.c", ".init.text"), ("three.c", ".text.late")):
        (tmp_path / file).write_text(
            f"{MODULE if file == 'one.c' else ''}\n"
            f'static __attribute__((noipa, section("{section}"))) int twice(int n) {{ return n; }}\n'
            f"int (*use_{file[:-2]})(int) = twice;\n"
        )
    Toolbox(tmp_path).run("gcc", "-O1", "-r", "-Wl,--build-id", "one.c", "two.c", "three.c", "-o", "stock.ko")
    elf = ElfFile.open(tmp_path / "stock.ko")
    monkeypatch.setattr(kernel_files, "described_module", lambda _name: elf)
    (tmp_path / "stock").mkdir()
    (tmp_path / "stock" / ".text").write_text("0xffffffffc0100000\n")
    (tmp_path / "stock" / ".text.late").write_text("0xffffffffc0200000\n")
    found = sources_in_module("twice", "stock", f"{tmp_path}/{{}}")
    assert sorted((address >> 20, file) for address, file in found.items()) == [
        (0xFFFFFFFFC01, "one.c"),
        (0xFFFFFFFFC02, "three.c"),
    ]
    assert sources_in_module("nothing", "stock", f"{tmp_path}/{{}}") == {}
