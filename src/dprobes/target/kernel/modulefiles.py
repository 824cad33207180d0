"""
The files of the kernel's modules: where the one of a module is, and its bytes, which may be compressed.

depmod(8) lists the files of a kernel in ``modules.dep``, those that are a part of it in ``modules.builtin``.
"""

from __future__ import annotations

import lzma
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.diagnostics import near_names
from dprobes.errors import TargetError, reason_of
from dprobes.target.elf.contents import file_contents
from dprobes.target.elf.file import ElfFile

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["find_module_file", "module_name", "open_module_file"]

_MODULES = Path("/lib/modules")
_SIZE_MAX = 512 << 20
"""Bytes of a module's file: the largest ones, with debug information, have a tenth."""

_XZ, _GZIP, _ZSTD = b"\xfd7zXZ\x00", b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


def module_name(name: str) -> str:
    """Return what the kernel calls the module that a program names: ``snd-pcm.ko`` is ``snd_pcm``."""
    stem = Path(name).name.partition(".ko")[0]
    return stem.replace("-", "_")


def find_module_file(name: str, release: str | None = None, root: Path = _MODULES) -> Path:
    """
    Return the file of a module that a program names, by its name or by a path, for a release of the kernel.

    By default that is the running one. Raise ``TargetError`` if there is none; it says where was looked.
    """
    if "/" in name:
        return Path(name)
    module = module_name(name)
    directory = root / (release or os.uname().release)
    listed = dict(_listed(directory))
    if module in listed:
        return directory / listed[module]
    if module in (module_name(line) for line in _lines(directory / "modules.builtin")):
        raise TargetError(
            f"'{module}' is a part of the kernel, not a module that is loaded",
            hint="write 'name = vmlinux' and 'modtype = kernel'",
        )
    near = near_names(module, listed, 2)
    raise TargetError(
        f"there is no module '{module}': it is not loaded, and {directory} has no file of it",
        hint=f"did you mean {' or '.join(repr(each) for each in near)}?"
        if near
        else 'load it, or name its file by a path: name = "/PATH/NAME.ko"',
    )


def _listed(directory: Path) -> Iterator[tuple[str, str]]:
    """Give the names of modules with their paths in a directory, from depmod's list, or else by looking."""
    lines = _lines(directory / "modules.dep")
    for line in lines:
        path = line.partition(":")[0]
        yield module_name(path), path
    if not lines:
        for found in sorted(directory.rglob("*.ko*")):
            path = str(found.relative_to(directory))
            yield module_name(path), path


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def open_module_file(path: Path) -> ElfFile:
    """Return the file of a module, unpacked; raise ``TargetError`` if it is none."""
    elf = ElfFile.of_bytes(path, _unpacked(path, bytes(file_contents(path, "a module of the kernel"))))
    if elf.type != "rel" or not any(section.name == ".gnu.linkonce.this_module" for section in elf.sections):
        raise TargetError(
            f"'{path}' is not a module of the kernel", hint="modules are relocatable ELF files whose names end in '.ko'"
        )
    return elf


def _unpacked(path: Path, data: bytes) -> bytes:
    try:
        if data.startswith(_XZ):
            return lzma.LZMADecompressor().decompress(data, _SIZE_MAX)
        if data.startswith(_GZIP):
            return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(data, _SIZE_MAX)
    except (lzma.LZMAError, zlib.error) as error:
        raise TargetError(f"'{path}' cannot be unpacked: {error}") from error
    return _unpacked_by_zstd(path, data) if data.startswith(_ZSTD) else data


def _unpacked_by_zstd(path: Path, data: bytes) -> bytes:
    """Unpack a file by zstd(1), which Python has only since 3.14."""
    import subprocess

    try:
        done = subprocess.run(["zstd", "-dcq", "-M512MB"], input=data, capture_output=True, check=False)
    except OSError as error:
        raise TargetError(
            f"'{path}' cannot be unpacked: zstd: {reason_of(error)}", hint="install the package 'zstd'"
        ) from error
    if done.returncode:
        raise TargetError(f"'{path}' cannot be unpacked: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
