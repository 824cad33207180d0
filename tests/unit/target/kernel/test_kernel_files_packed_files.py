"""Images and modules' files, in every compression that there is."""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import TargetError
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.kernel.kernel_files import open_packed
from unit.target.kernel.conftest import boot_image

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def by_tool(*command: str) -> Callable[[bytes], bytes]:
    def pack(data: bytes) -> bytes:
        if shutil.which(command[0]) is None:
            pytest.skip(f"{command[0]} is not installed")
        return subprocess.run(command, input=data, capture_output=True, check=True).stdout

    return pack


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "none": bytes,
    "gzip": gzip.compress,
    "xz": lzma.compress,
    "lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
    "bzip2": bz2.compress,
    "lz4": by_tool("lz4", "-lc"),
    "zstd": by_tool("zstd", "-c"),
}


@pytest.mark.parametrize("packer", PACKERS)
def test_the_kernel_is_taken_out_of_its_image(packer: str, kernel_file: Callable[[str], Path], tmp_path: Path) -> None:
    kernel = kernel_file("vmlinux")
    path = tmp_path / "vmlinuz"
    packed = PACKERS[packer](kernel.read_bytes())
    path.write_bytes(boot_image(packed, with_size=packer not in ("none", "gzip")))
    assert open_packed(path).build_id == ElfFile.open(kernel).build_id
    assert open_packed(path).data == kernel.read_bytes()


@pytest.mark.parametrize("packer", ["none", "xz", "zstd"])
def test_files_of_modules_are_unpacked(packer: str, kernel_file: Callable[[str], Path]) -> None:
    module = kernel_file("dummy.ko")
    data = module.read_bytes()
    module.write_bytes(PACKERS[packer](data))
    assert open_packed(module).data == data


def test_what_cannot_be_unpacked_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path = tmp_path / "vmlinuz"

    def message(data: bytes) -> str:
        path.write_bytes(data)
        with pytest.raises(TargetError) as caught:
            open_packed(path)
        return caught.value.message

    assert message(b"LZO?") == f"'{path}' is compressed in a way that is not known here: it begins with 4c5a4f3f"
    assert message(b"\x1f\x8bxx").startswith(f"'{path}' cannot be unpacked: ")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert message(b"\x28\xb5\x2f\xfd") == f"'{path}' is compressed with zstd, which is not installed"


def test_the_package_is_used_where_the_program_is_missing(
    kernel_file: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zstandard = pytest.importorskip("zstandard")
    module = kernel_file("dummy.ko")
    data = module.read_bytes()
    module.write_bytes(zstandard.ZstdCompressor().compress(data))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert open_packed(module).data == data


def test_what_a_program_says_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "zstd"
    tool.write_text("#!/bin/sh\necho no such luck >&2\nexit 3\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    path = tmp_path / "vmlinuz"
    path.write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(TargetError) as caught:
        open_packed(path)
    assert caught.value.message == f"'{path}' cannot be unpacked: zstd ended with 3: no such luck"
