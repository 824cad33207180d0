"""The text of a kernel and a module by their files, at the addresses where they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.target.code.machine_code import decode
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.kernel.kernel_files import FileText, KernelFiles, module_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CLOSED = "/proc/kcore cannot be opened: Operation not permitted"
TEXT = 0xFFFFFFFF9A000000
MODULE = 0xFFFFFFFFC0201000


def note(build_id: str) -> bytes:
    data = bytes.fromhex(build_id)
    xen = b"\x04\0\0\0\x04\0\0\0\x06\0\0\0Xen\0abcd"
    return xen + b"\x04\0\0\0" + len(data).to_bytes(4, "little") + b"\x03\0\0\0GNU\0" + data


class Machine:
    """The files of a machine whose kernel and module 'dummy' run somewhere."""

    def __init__(self, directory: Path, image: Path, module: Path) -> None:
        self.files = KernelFiles((image,), directory / "modules", directory / "notes", directory / "loaded")
        self.files.notes.write_bytes(note(ElfFile.open(image).build_id or ""))
        place = self.files.modules / "kernel" / "net"
        place.mkdir(parents=True)
        self.module = module.rename(place / "dummy.ko")
        own = self.files.loaded / "dummy"
        (own / "notes").mkdir(parents=True)
        (own / "notes" / ".note.gnu.build-id").write_bytes(note(ElfFile.open(self.module).build_id or ""))
        (own / "sections").mkdir()
        (own / "sections" / ".text").write_text(f"{MODULE:#x}\n")

    @property
    def text(self) -> FileText:
        return FileText(CLOSED, self.files, lambda: TEXT, lambda: [("dummy", MODULE, 4096)])


@pytest.fixture
def machine(kernel_file: Callable[[str], Path], tmp_path: Path) -> Machine:
    return Machine(tmp_path, kernel_file("vmlinux"), kernel_file("dummy.ko"))


@pytest.mark.parametrize("base", [TEXT, MODULE])
def test_code_is_read_where_it_runs(machine: Machine, base: int) -> None:
    text = machine.text
    listing = [each.mnemonic for each in decode(text.read(base + 0x10, 13), 64, base + 0x10)]
    assert listing == ["push", "mov", "mov", "mov", "pop"]
    assert text.problem_at(base) is None
    assert text.origin_of(base) == str(machine.module if base == MODULE else machine.files.images[0])


def test_the_distance_from_where_it_was_linked_is_known(machine: Machine) -> None:
    assert machine.text.shift == TEXT - 0xFFFFFFFF81000000


@pytest.mark.parametrize("base", [TEXT, MODULE])
def test_patched_code_is_known(machine: Machine, base: int) -> None:
    text = machine.text
    instructions = decode(text.read(base, 0x1E), 64, base)
    patched = [each.address - base for each in instructions if text.is_patched(each) and each.mnemonic != "nop"]
    assert patched == [0, 4, 0x16, 0x19]


def test_all_code_may_be_patched_where_alternatives_are_not_understood(machine: Machine) -> None:
    image = machine.files.images[0]
    elf = ElfFile.open(image)
    section = next(section for section in elf.sections if section.name == ".altinstructions")
    assert isinstance(elf.data, bytes)
    image.write_bytes(elf.data[: section.offset] + b"\x7f" * 4 + elf.data[section.offset + 4 :])
    text = machine.text
    assert all(text.is_patched(each) for each in decode(text.read(TEXT + 0x10, 13), 64, TEXT + 0x10))


def test_a_file_of_another_kernel_does_not_count(machine: Machine) -> None:
    machine.files.notes.write_bytes(note("ab" * 20))
    text = machine.text
    found = ElfFile.open(machine.files.images[0]).build_id
    assert text.read(TEXT, 4) == b""
    assert text.shift is None
    assert text.problem_at(TEXT) == (
        f"{CLOSED}, and '{machine.files.images[0]}' is not that of the running kernel: its build-id is {found}, "
        f"not {'ab' * 20}"
    )


def test_the_lack_of_a_file_is_named(machine: Machine) -> None:
    machine.files.images[0].unlink()
    machine.module.unlink()
    text = machine.text
    assert text.problem_at(TEXT) == f"{CLOSED}, and there is no file of the running kernel ({machine.files.images[0]})"
    assert text.problem_at(MODULE) == f"{CLOSED}, and there is no file of the module 'dummy' that is loaded"


def test_an_address_that_no_file_has(machine: Machine) -> None:
    assert machine.text.problem_at(TEXT + (1 << 24)) == f"{CLOSED}, and the address is in no file"


def test_names_of_modules_have_either_stroke(tmp_path: Path) -> None:
    for name in ("virtio-net.ko.xz", "virtio_net.ko.zst", "virtio_net_x.ko", "virtio_net"):
        (tmp_path / name).touch()
    assert {path.name for path in module_files(tmp_path, "virtio_net")} == {"virtio-net.ko.xz", "virtio_net.ko.zst"}
