"""
Kernels for guests: Debian's cloud images, downloaded with apt, unpacked, never installed on this machine.

What is made is kept in ``$XDG_CACHE_HOME/dprobes/guest`` (``~/.cache``), by the package's name and version.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

__all__ = ["KERNELS", "UnavailableError", "cache_directory", "vmlinux"]

KERNELS = {"6.1": "linux-image-cloud-amd64", "6.12": "linux-image-6.12-cloud-amd64"}
"""The kernels that tests ask for, and the metapackages that lead to their newest images in Debian 12."""

_DOWNLOAD_TIMEOUT = 120

# Documentation/arch/x86/boot.rst: what unpacks the payload of a bzImage, by how that begins.
_SETUP_SECTORS, _PAYLOAD = 0x1F1, 0x248
_UNPACKERS = {
    b"\x02\x21\x4c\x18": ("lz4", "-dc"),
    b"\xfd7zXZ\x00": ("xz", "-dc"),
    b"\x28\xb5\x2f\xfd": ("zstd", "-dc"),
}


class UnavailableError(Exception):
    """Say why there can be no guest here: the reason of a skip."""


def cache_directory() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = base / "dprobes" / "guest"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@functools.cache
def vmlinux(kernel: str) -> Path:
    """Return the uncompressed kernel of a series, such as ``6.1``; it can be booted without its boot loader's part."""
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise UnavailableError(f"a guest's kernel is a Debian package, and '{tool}' is not installed")
    package = _package(kernel)
    output = cache_directory() / f"{package}.vmlinux"
    if output.exists():
        return output
    with tempfile.TemporaryDirectory(dir=output.parent) as name:
        directory = Path(name)
        _run("apt-get", "download", package, cwd=directory)
        _run("dpkg", "-x", *(str(path) for path in directory.glob("*.deb")), str(directory), cwd=directory)
        (image,) = directory.glob("boot/vmlinuz-*")
        unpacked = directory / "vmlinux"
        _unpack(image.read_bytes(), unpacked)
        unpacked.rename(output)
    return output


def _package(kernel: str) -> str:
    """Return the package that a metapackage leads to; one that was downloaded before if apt knows none."""
    known = sorted(cache_directory().glob(f"linux-image-{kernel}.*.vmlinux"), key=lambda path: path.stat().st_mtime)
    if known:
        return known[-1].stem
    listing = subprocess.run(
        ["apt-cache", "depends", KERNELS[kernel]], capture_output=True, text=True, check=False
    ).stdout
    found = re.search(rf"Depends: (linux-image-{re.escape(kernel)}\.\S+)", listing)
    if found is None:
        raise UnavailableError(f"apt knows no package of a Linux {kernel} kernel (apt-get update may help)")
    return found[1]


def _run(*command: str, cwd: Path) -> None:
    try:
        subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"'{' '.join(command[:3])}' takes too long") from None
    except subprocess.CalledProcessError as error:
        raise UnavailableError(f"'{' '.join(command[:3])}' failed: {error.stderr.strip()[-200:]}") from None


def _unpack(image: bytes, output: Path) -> None:
    start = ((image[_SETUP_SECTORS] or 4) + 1) * 512
    offset, length = struct.unpack_from("<II", image, _PAYLOAD)
    payload = image[start + offset : start + offset + length]
    command = next((command for magic, command in _UNPACKERS.items() if payload.startswith(magic)), None)
    if command is None:
        raise UnavailableError(f"the kernel is compressed in an unknown way ({payload[:4].hex()})")
    if shutil.which(command[0]) is None:
        raise UnavailableError(f"the kernel is compressed with {command[0]}, which is not installed")
    with output.open("wb") as file:
        # The last four bytes are the size, which these tools take for garbage.
        subprocess.run(command, input=payload[:-4], stdout=file, stderr=subprocess.DEVNULL, check=True)
