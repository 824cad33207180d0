"""
Files of the kernel as distributions install them: compressed, and the image in a wrapper of its own.

An image for x86 (bzImage) is code that unpacks the kernel, with the kernel as its payload::

    0x1F1  u8   setup_sects: how many sectors of 512 bytes stand before the code, after the first
    0x202  "HdrS"
    0x248  u32  payload_offset, counted from the code
    0x24C  u32  payload_length, with the four bytes behind all but gzip that say how large the kernel is

Rules: Documentation/arch/x86/boot.rst; cmd_lz4_with_size and its like in scripts/Makefile.lib.
"""

from __future__ import annotations

import shutil
import struct
from typing import TYPE_CHECKING

from dprobes.errors import TargetError, reason_of
from dprobes.target.elf.contents import file_contents
from dprobes.target.elf.file import ElfFile

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["open_packed"]

_ELF = b"\x7fELF"
_GZIP, _XZ, _LZMA, _BZIP2 = b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x5d\x00\x00", b"BZh"
_ZSTD = b"\x28\xb5\x2f\xfd"
_TOOLS = {b"\x02\x21\x4c\x18": "lz4", _ZSTD: "zstd"}
"""What the standard library cannot unpack, by its first bytes: programs that do with ``-dc``."""

_SETUP_SECTORS, _MAGIC, _PAYLOAD = 0x1F1, 0x202, 0x248
_SECTOR = 512
_SIZE = 4  # bytes behind the payload

_GZIP_WINDOW = 31  # zlib: any window, with the header of gzip


def open_packed(path: Path) -> ElfFile:
    """Return the ELF file that is a kernel's image or a module's file; raise ``TargetError`` if it cannot be had."""
    data = bytes(file_contents(path, "a file of the kernel")[:])
    if data[_MAGIC : _MAGIC + 4] == b"HdrS":
        start = ((data[_SETUP_SECTORS] or 4) + 1) * _SECTOR
        offset, length = struct.unpack_from("<II", data, _PAYLOAD)
        data = data[start + offset : start + offset + length]
        if not data.startswith((_GZIP, _ELF)):
            data = data[:-_SIZE]
    return ElfFile.of_bytes(path, data if data.startswith(_ELF) else _unpacked(path, data))


def _unpacked(path: Path, data: bytes) -> bytes:
    """Return what the standard library, or else a program, makes of compressed data; what follows it is ignored."""
    import bz2
    import lzma
    import zlib

    try:
        if data.startswith(_GZIP):
            return zlib.decompressobj(_GZIP_WINDOW).decompress(data)
        if data.startswith((_XZ, _LZMA)):
            return lzma.LZMADecompressor().decompress(data)
        if data.startswith(_BZIP2):
            return bz2.BZ2Decompressor().decompress(data)
    except (zlib.error, lzma.LZMAError, OSError) as error:
        raise TargetError(f"'{path}' cannot be unpacked: {error}") from error
    if data.startswith(_ZSTD) and (unpacked := _by_package(data)) is not None:
        return unpacked
    tool = next((tool for magic, tool in _TOOLS.items() if data.startswith(magic)), None)
    if tool is None:
        raise TargetError(f"'{path}' is compressed in a way that is not known here: it begins with {data[:4].hex()}")
    return _unpacked_by(tool, path, data)


def _by_package(data: bytes) -> bytes | None:
    """Return what the package zstandard makes of data, which 'dprobes[zstd]' installs; None without it."""
    try:
        import zstandard
    except ImportError:
        return None
    try:
        return zstandard.ZstdDecompressor().decompressobj().decompress(data) or None
    except zstandard.ZstdError:
        return None  # the program says what is wrong


def _unpacked_by(tool: str, path: Path, data: bytes) -> bytes:
    import subprocess

    if shutil.which(tool) is None:
        raise TargetError(f"'{path}' is compressed with {tool}, which is not installed")
    try:
        done = subprocess.run([tool, "-dc"], input=data, capture_output=True, check=False)
    except OSError as error:
        raise TargetError(f"'{path}' cannot be unpacked: {tool}: {reason_of(error)}") from error
    if done.returncode != 0 or not done.stdout:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise TargetError(f"'{path}' cannot be unpacked: {tool} ended with {done.returncode}: {' '.join(said[-1:])}")
    return done.stdout
