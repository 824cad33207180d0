"""
The root file system of a guest: this machine's Python and tools, and the tree under test.

It is a cpio archive in the "newc" format (Documentation/driver-api/early-userspace/buffer-format.rst), which the kernel
unpacks into memory. Archives can be concatenated: what seldom changes is kept in one, by the digest of what is in it;
the other, with the sources as they are now, is made for each test run.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from guests.images import cache_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from guests.images import Image

__all__ = ["PYTHON", "REPOSITORY", "archive", "libraries_of", "make_initramfs"]

REPOSITORY = Path(__file__).parents[2]
PYTHON = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"

_LEFT_OUT = {"test", "tests", "idlelib", "tkinter", "lib2to3", "ensurepip", "pydoc_data", "turtledemo",
             "distutils", "venv", "dist-packages", "site-packages"}  # fmt: skip
_PACKAGES = ("click", "elftools", "iced_x86", "pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
_PROGRAMS = (
    *("sh", "bash", "cat", "chmod", "cp", "date", "dd", "dmesg", "env", "false", "grep", "head", "kill", "ln", "ls"),
    *("mkdir", "mknod", "mv", "od", "ps", "readlink", "rm", "rmdir", "sed", "seq", "sleep", "stat", "sync", "tail"),
    *("touch", "true", "uname", "wc", "xargs", "mount", "umount", "ip", "losetup", "mkfs.ext4", "taskset"),
    *("nm", "objdump", "readelf"),
)
_UNUSED = 3600
"""Age in seconds from which archives of other files are removed; another checkout may still use newer ones."""

_INIT = "#!{python} -B\nimport sys\nsys.path[:0] = {path}\nfrom guests.agent import main\nmain({modules})\n"
_LINE_MODULES = ("virtio_pci", "virtio_console")
"""The modules for the connection to the agent, unless they are built into the kernel."""
_MERGED = ("bin", "lib", "lib64", "sbin")
"""Directories that are symbolic links to directories in /usr."""
_PATH = "/usr/bin:/usr/sbin:/bin:/sbin"

_I386_LIBRARIES = "/usr/i686-linux-gnu/lib"


def archive(files: Mapping[str, Path | bytes]) -> bytes:
    """
    Return a cpio archive of files, keyed by absolute path in the guest; their directories are added.

    Files keep their times, by which Python recognises valid bytecode.
    """
    made: set[str] = set()
    parts: list[bytes] = []

    def add(name: str, mode: int, data: bytes, modified: int = 0) -> None:
        path = name.encode() + b"\0"
        number = len(parts) + 1
        fields = (number, mode, 0, 0, 1, modified, len(data), 0, 0, 0, 0, len(path), 0)
        head = b"070701" + b"".join(b"%08x" % field for field in fields) + path
        parts.append(head.ljust(-(-len(head) // 4) * 4, b"\0") + data.ljust(-(-len(data) // 4) * 4, b"\0"))

    for name in _MERGED:
        add(name, stat.S_IFLNK | 0o777, b"usr/" + name.encode())
    for name, content in files.items():
        inside = name.lstrip("/")
        if inside.split("/")[0] in _MERGED:
            inside = f"usr/{inside}"
        for parent in reversed(Path(inside).parents[:-1]):
            if str(parent) not in made:
                made.add(str(parent))
                add(str(parent), stat.S_IFDIR | 0o755, b"")
        if isinstance(content, bytes):
            add(inside, stat.S_IFREG | 0o755, content)
        else:
            found = content.stat()
            mode = stat.S_IFREG | stat.S_IMODE(found.st_mode) | 0o444
            add(inside, mode, content.read_bytes(), int(found.st_mtime))
    add("TRAILER!!!", 0, b"")
    return b"".join(parts)


def make_initramfs(image: Image, programs: Sequence[str], output: BinaryIO) -> None:
    """
    Write the root file system of a guest with the kernel ``image`` to ``output``.

    ``programs`` are names of further programs of this machine to include.
    """
    files = _base_files() | _programs(programs)
    with _archive_of(files).open("rb") as base:
        shutil.copyfileobj(base, output)
    modules = image.modules(*(name for name in _LINE_MODULES if name in image))
    path = [f"{REPOSITORY}/src", f"{REPOSITORY}/tests", "/packages"]
    init = _INIT.format(python=PYTHON, path=path, modules=[module.path for module in modules])
    output.write(
        archive({**_source_files(), **{module.path: module.data for module in modules}, "/init": init.encode()})
    )


def _archive_of(files: Mapping[str, Path | bytes]) -> Path:
    """Return the cached archive of files; it is created again if one of the files has changed."""
    digest = hashlib.sha256()
    for name, content in files.items():
        state = content if isinstance(content, bytes) else repr(_identity(content)).encode()
        digest.update(name.encode() + b"\0" + state)
    output = cache_directory() / f"base-{digest.hexdigest()[:16]}.cpio"
    if output.exists():
        os.utime(output)
        return output
    for old in output.parent.glob("base-*"):
        if time.time() - old.stat().st_mtime > _UNUSED:
            old.unlink(missing_ok=True)
    temporary = output.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(archive(files))
    temporary.rename(output)
    return output


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _base_files() -> dict[str, Path | bytes]:
    library = Path(sysconfig.get_path("stdlib"))
    packages = Path(sysconfig.get_path("purelib"))
    files: dict[str, Path | bytes] = {str(PYTHON): PYTHON}
    files["/etc/passwd"] = b"root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n"
    files |= {str(path): path for path in _tree(library)}
    for package in _PACKAGES:
        tree = packages / package
        if tree.exists():
            files |= {f"/packages/{path.relative_to(packages)}": path for path in _tree(tree)}
    files["/packages/py.py"] = packages / "py.py"
    objects = [path for path in files.values() if isinstance(path, Path) and _is_object(path)]
    files |= {name: Path(name) for name in libraries_of(objects)} | _programs(_PROGRAMS)
    if Path(_I386_LIBRARIES).exists():
        for name in ("ld-linux.so.2", "libc.so.6", "libpthread.so.0"):
            files[f"{_I386_LIBRARIES}/{name}"] = Path(_I386_LIBRARIES, name)
    return files


def _programs(names: Sequence[str]) -> dict[str, Path | bytes]:
    """Return the files of those programs that this machine has, and of their libraries."""
    found = [path for name in names if (path := shutil.which(name, path=_PATH)) is not None]
    return {path: Path(path) for path in (*found, *libraries_of(map(Path, found)))} if found else {}


def _is_object(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _tree(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.rglob("*")):
        first = path.relative_to(directory).parts[0]
        if first in _LEFT_OUT or first.startswith("config-"):
            continue
        if path.is_file() and not path.name.endswith((".opt-1.pyc", ".opt-2.pyc", ".a")):
            yield path


def libraries_of(objects: Iterable[Path]) -> list[str]:
    """Return the paths of all libraries that programs and libraries need, as ldd(1) prints them."""
    listing = subprocess.run(
        ["ldd", *(str(path) for path in objects)], capture_output=True, text=True, check=False
    ).stdout
    return sorted(set(re.findall(r"(?:=> |^\t)(/\S+) \(0x", listing, re.MULTILINE)))


_KINDS = (".py", ".pyc", ".case", ".c", ".rpn", ".dpc", ".h", ".txt", ".fmt", ".lst", ".toml")
"""The name suffixes of the files of this checkout that tests in a guest read."""


def _source_files() -> dict[str, Path | bytes]:
    """Return the sources and tests of this checkout at the same paths, to which tracebacks then refer."""
    files: dict[str, Path | bytes] = {}
    for name in ("src", "tests", "examples"):
        for path in sorted((REPOSITORY / name).rglob("*")):
            if path.is_file() and path.suffix in _KINDS:
                files[str(path)] = path
    files[str(REPOSITORY / "pyproject.toml")] = REPOSITORY / "pyproject.toml"
    return files
