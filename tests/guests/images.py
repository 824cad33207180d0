"""
Kernels for guests: Debian's cloud images, downloaded with apt, unpacked, never installed on this machine.

They are kept in ``$XDG_CACHE_HOME/dprobes/guest`` (``~/.cache``), each in a directory by its package's name.
"""

from __future__ import annotations

import functools
import lzma
import os
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

__all__ = [
    "BUILT",
    "KERNELS",
    "SOURCE_PACKAGE",
    "Image",
    "Module",
    "NotBuiltError",
    "UnavailableError",
    "built_directory",
    "cache_directory",
    "image",
]

KERNELS = {
    "6.1": ("linux-image-cloud-amd64",),
    "6.12": ("linux-image-6.12-cloud-amd64", "linux-image-cloud-amd64"),
}
"""The series of kernels for tests, and the metapackages of Debian 12 or 13 that may depend on an image of each."""

BUILT = "6.12-override"
"""
A kernel that ``make guest-kernel`` builds, because none of Debian's has CONFIG_BPF_KPROBE_OVERRIDE.

It is small: it has no BTF type information, and no modules.
"""

SOURCE_PACKAGE = "linux-source-6.12"

_DOWNLOAD_TIMEOUT = 120

# Documentation/arch/x86/boot.rst: what unpacks the payload of a bzImage, by its magic number.
_SETUP_SECTORS, _PAYLOAD = 0x1F1, 0x248
_UNPACKERS = {
    b"\x02\x21\x4c\x18": ("lz4", "-dc"),
    b"\xfd7zXZ\x00": ("xz", "-dc"),
    b"\x28\xb5\x2f\xfd": ("zstd", "-dc"),
}


class UnavailableError(Exception):
    """Guests are not possible on this machine; the message is the reason of a skip."""


class NotBuiltError(UnavailableError):
    """A kernel is missing that has to be built from source, which takes longer than tests may take."""


@dataclass(frozen=True)
class Module:
    """A kernel module: its path in the guest, uncompressed contents, and the names of the modules that it needs."""

    name: str
    path: str
    data: bytes
    needs: tuple[str, ...]


@dataclass(frozen=True)
class Image:
    """The unpacked package of a kernel of the series ``series``, such as 6.1."""

    series: str
    directory: Path

    @cached_property
    def release(self) -> str:
        """The kernel release, as ``uname -r`` prints it in the guest."""
        (path,) = self.directory.glob("boot/vmlinuz-*")
        return path.name.removeprefix("vmlinuz-")

    @property
    def vmlinuz(self) -> Path:
        """The compressed image, which a boot loader starts; it selects its own address (KASLR)."""
        return self.directory / "boot" / f"vmlinuz-{self.release}"

    @property
    def vmlinux(self) -> Path:
        """The uncompressed kernel, which boots faster, always at its link address."""
        return self.directory / "vmlinux"

    @cached_property
    def options(self) -> frozenset[str]:
        """The configuration options with which the kernel was built, as built-in or module."""
        text = (self.directory / "boot" / f"config-{self.release}").read_text()
        return frozenset(re.findall(r"^(CONFIG_\w+)=[ym]$", text, re.MULTILINE))

    def __contains__(self, module: str) -> bool:
        return _module_name(module) in self._modules

    def module(self, name: str) -> Module:
        """Return a module by its name; raise KeyError if the package lacks it."""
        path = self._modules[_module_name(name)]
        data = path.read_bytes()
        if path.suffix == ".xz":
            data = lzma.decompress(data)
        # The section .modinfo: strings "name=value", each ended by a zero byte.
        found = re.search(rb"\0depends=([^\0]*)\0", data)
        needs = tuple(found[1].decode().split(",")) if found is not None and found[1] else ()
        inside = f"/{path.relative_to(self.directory)}".removeprefix("/usr").removesuffix(".xz")
        return Module(_module_name(name), inside, data, needs)

    def modules(self, *names: str) -> list[Module]:
        """Return modules and all modules that they need, in an order in which they can be loaded."""
        ordered: dict[str, Module] = {}

        def add(name: str) -> None:
            if _module_name(name) not in ordered:
                module = self.module(name)
                for needed in module.needs:
                    add(needed)
                ordered[module.name] = module

        for name in names:
            add(name)
        return list(ordered.values())

    @cached_property
    def _modules(self) -> dict[str, Path]:
        return {_module_name(path.name.split(".")[0]): path for path in self.directory.rglob("*.ko*")}


def _module_name(name: str) -> str:
    return name.replace("-", "_")


def cache_directory() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = base / "dprobes" / "guest"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def built_directory() -> Path:
    """Return the directory of the kernel that is built for guests, which need not exist."""
    return cache_directory() / f"linux-image-{BUILT}"


@functools.cache
def image(series: str) -> Image:
    """Return the kernel of a series, such as ``6.1``; it is downloaded if it is not in the cache."""
    if series == BUILT:
        if not (built_directory() / "vmlinux").exists():
            raise NotBuiltError("none with CONFIG_BPF_KPROBE_OVERRIDE has been built ('make guest-kernel')")
        return Image(series.partition("-")[0], built_directory())
    unpacked = [path.parent for path in cache_directory().glob(f"linux-image-{series}.*/vmlinux")]
    if unpacked:
        return Image(series, max(unpacked, key=lambda path: path.stat().st_mtime))
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise UnavailableError(f"a guest's kernel is a Debian package, and '{tool}' is not installed")
    try:
        return _download(series)
    except UnavailableError:
        # The lists of packages are not there, or too old.
        if os.geteuid() != 0:
            raise
        _run("apt-get", "update", "-qq", cwd=cache_directory())
        return _download(series)


def _download(series: str) -> Image:
    package = _package(series)
    output = cache_directory() / package
    with tempfile.TemporaryDirectory(dir=output.parent) as name:
        directory = Path(name, "image")
        directory.mkdir()
        _run("apt-get", "download", package, cwd=Path(name))
        _run("dpkg", "-x", *(str(path) for path in Path(name).glob("*.deb")), str(directory), cwd=Path(name))
        _unpack(Image(series, directory))
        if not output.exists():  # another test run may have been faster
            directory.rename(output)
    return Image(series, output)


def _package(series: str) -> str:
    """Return the name of the package on which the metapackage of a series depends."""
    for metapackage in KERNELS[series]:
        listing = subprocess.run(
            ["apt-cache", "depends", metapackage], capture_output=True, text=True, check=False
        ).stdout
        if found := re.search(rf"Depends: (linux-image-{re.escape(series)}\.\S+)", listing):
            return found[1]
    raise UnavailableError(f"apt knows no package of a Linux {series} kernel")


def _run(*command: str, cwd: Path) -> None:
    try:
        subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"'{' '.join(command[:3])}' takes too long") from None
    except subprocess.CalledProcessError as error:
        raise UnavailableError(f"'{' '.join(command[:3])}' failed: {error.stderr.strip()[-200:]}") from None


def _unpack(image: Image) -> None:
    data = image.vmlinuz.read_bytes()
    start = ((data[_SETUP_SECTORS] or 4) + 1) * 512
    offset, length = struct.unpack_from("<II", data, _PAYLOAD)
    payload = data[start + offset : start + offset + length]
    command = next((command for magic, command in _UNPACKERS.items() if payload.startswith(magic)), None)
    if command is None:
        raise UnavailableError(f"the kernel is compressed in an unknown way ({payload[:4].hex()})")
    if shutil.which(command[0]) is None:
        raise UnavailableError(f"the kernel is compressed with {command[0]}, which is not installed")
    with image.vmlinux.open("wb") as file:
        # The last four bytes are the size, which these tools take for garbage.
        subprocess.run(command, input=payload[:-4], stdout=file, stderr=subprocess.DEVNULL, check=True)
