"""Where the file of a module is, and what becomes of one that is packed, or is none."""

from __future__ import annotations

import gzip
import lzma
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import TargetError
from dprobes.target.kernel.kernel_files import find_module_file, open_module_file
from unit.target.kernel.modulewriter import module_bytes

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "6.1.0"
    (directory / "kernel/drivers").mkdir(parents=True)
    (directory / "kernel/drivers/snd-pcm.ko.xz").write_bytes(lzma.compress(module_bytes("snd_pcm")))
    (directory / "modules.builtin").write_text("kernel/fs/ext4/ext4.ko\n")
    return tmp_path


@pytest.mark.parametrize("name", ["snd_pcm", "snd-pcm", "snd-pcm.ko"])
@pytest.mark.parametrize("is_listed", [False, True])
def test_a_module_has_the_name_that_the_kernel_gives_it(root: Path, name: str, *, is_listed: bool) -> None:
    if is_listed:
        (root / "6.1.0/modules.dep").write_text("kernel/drivers/snd-pcm.ko.xz: kernel/soundcore.ko\n")
    assert find_module_file(name, "6.1.0", root) == root / "6.1.0/kernel/drivers/snd-pcm.ko.xz"


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        (
            "ext4",
            "'ext4' is a part of the kernel, not a module that is loaded",
            "write 'name = vmlinux' and 'modtype = kernel'",
        ),
        (
            "snd_pmc",
            "there is no module 'snd_pmc': it is not loaded, and {root}/6.1.0 has no file of it",
            "did you mean 'snd_pcm'?",
        ),
        (
            "vortex",
            "there is no module 'vortex': it is not loaded, and {root}/6.1.0 has no file of it",
            'load it, or name its file by a path: name = "/PATH/NAME.ko"',
        ),
    ],
)
def test_it_is_said_where_was_looked(root: Path, name: str, message: str, hint: str) -> None:
    with pytest.raises(TargetError) as caught:
        find_module_file(name, "6.1.0", root)
    assert (caught.value.message, caught.value.hint) == (message.format(root=root), hint)


@pytest.mark.parametrize("pack", [bytes, lzma.compress, gzip.compress])
def test_files_are_unpacked(tmp_path: Path, pack: object) -> None:
    path = tmp_path / "sample.ko"
    path.write_bytes(pack(module_bytes()))  # type: ignore[operator]
    assert open_module_file(path).type == "rel"


@pytest.mark.skipif(shutil.which("zstd") is None, reason="needs zstd")
def test_zstd_unpacks_a_file(tmp_path: Path) -> None:
    path = tmp_path / "sample.ko.zst"
    path.write_bytes(subprocess.run(["zstd", "-c"], input=module_bytes(), capture_output=True, check=True).stdout)
    assert open_module_file(path).type == "rel"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(TargetError, match="cannot be unpacked"):
        open_module_file(path)


def test_another_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError) as caught:
        open_module_file(tmp_path / "missing.ko")
    assert caught.value.message == f"'{tmp_path}/missing.ko' does not exist"
    (tmp_path / "torn.ko.xz").write_bytes(lzma.compress(module_bytes())[:30] + b"torn")
    with pytest.raises(TargetError):
        open_module_file(tmp_path / "torn.ko.xz")
    (tmp_path / "other.o").write_bytes(module_bytes().replace(b".gnu.linkonce", b".gnu.linktwice"[:13]))
    with pytest.raises(TargetError) as caught:
        open_module_file(tmp_path / "other.o")
    assert caught.value.message == f"'{tmp_path}/other.o' is not a module of the kernel"
