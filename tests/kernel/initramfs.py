"""
The root file system of a guest: this machine's Python and C library, and what tests add.

A cpio archive in the "newc" format (Documentation/driver-api/early-userspace/buffer-format.rst), which the kernel
unpacks into memory. Archives can be put behind each other: what seldom changes is kept in one, the sources in another.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kernel.images import cache_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["REPOSITORY", "archive", "base_archive", "libraries_of", "source_files"]

REPOSITORY = Path(__file__).parents[2]
PYTHON = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"

_LEFT_OUT = {"test", "tests", "idlelib", "tkinter", "lib2to3", "ensurepip", "pydoc_data", "turtledemo",
             "distutils", "venv", "dist-packages", "site-packages"}  # fmt: skip
_PACKAGES = ("click", "elftools", "iced_x86", "pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
_PROGRAMS = ("/bin/sh", "/bin/bash", "/bin/cat", "/bin/sleep", "/bin/true",
             "/usr/bin/nm", "/usr/bin/objdump", "/usr/bin/readelf", "/usr/bin/taskset")  # fmt: skip
_UNUSED = 3600
"""Seconds after which an archive of other files is taken away; another checkout may be about to use it."""

_AGENT = Path(__file__).with_name("agent.py")
_INIT = "#!{python} -Bu\nimport sys\nsys.path.insert(0, '/agent')\nimport agent\nagent.main()\n"
_I386_LIBRARIES = "/usr/i686-linux-gnu/lib"


def archive(files: Mapping[str, Path | bytes]) -> bytes:
    """
    Return an archive of files by their absolute paths in the guest; directories are made as needed.

    Files keep their times, by which Python recognises that what it has compiled is of the same source.
    """
    made: set[str] = set()
    parts: list[bytes] = []

    def add(name: str, mode: int, data: bytes, modified: int = 0) -> None:
        path = name.encode() + b"\0"
        number = len(parts) + 1
        fields = (number, mode, 0, 0, 1, modified, len(data), 0, 0, 0, 0, len(path), 0)
        head = b"070701" + b"".join(b"%08x" % field for field in fields) + path
        parts.append(head.ljust(-(-len(head) // 4) * 4, b"\0") + data.ljust(-(-len(data) // 4) * 4, b"\0"))

    for name, content in files.items():
        inside = name.lstrip("/")
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


def base_archive() -> Path:
    """Return the archive of what seldom changes; it is made anew when one of its files has."""
    files = _base_files()
    digest = hashlib.sha256()
    for name, content in files.items():
        state = content if isinstance(content, bytes) else repr(_identity(content)).encode()
        digest.update(name.encode() + b"\0" + state)
    output = cache_directory() / f"base-{digest.hexdigest()[:16]}.cpio"
    if not output.exists():
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
    files: dict[str, Path | bytes] = {str(PYTHON): PYTHON, "/init": _INIT.format(python=PYTHON).encode()}
    files["/agent/agent.py"] = _AGENT
    files["/etc/passwd"] = b"root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n"
    files |= {str(path): path for path in _tree(library)}
    for package in _PACKAGES:
        tree = packages / package
        if tree.exists():
            files |= {f"/packages/{path.relative_to(packages)}": path for path in _tree(tree)}
    files["/packages/py.py"] = packages / "py.py"
    files |= {name: Path(name) for name in _PROGRAMS if Path(name).exists()}
    objects = [path for path in files.values() if isinstance(path, Path) and _is_object(path)]
    files |= {name: Path(name) for name in libraries_of(objects)}
    if Path(_I386_LIBRARIES).exists():
        for name in ("ld-linux.so.2", "libc.so.6", "libpthread.so.0"):
            files[f"{_I386_LIBRARIES}/{name}"] = Path(_I386_LIBRARIES, name)
    return files


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


def libraries_of(objects: Iterable[Path]) -> set[str]:
    """Return the paths of all libraries that programs and libraries need, as ldd says."""
    listing = subprocess.run(
        ["ldd", *(str(path) for path in objects)], capture_output=True, text=True, check=False
    ).stdout
    return set(re.findall(r"(?:=> |^\t)(/\S+) \(0x", listing, re.MULTILINE))


def source_files() -> dict[str, Path | bytes]:
    """Return the sources and tests of this checkout, at their own paths, so that tracebacks lead to them."""
    files: dict[str, Path | bytes] = {}
    for name in ("src", "tests"):
        for path in sorted((REPOSITORY / name).rglob("*")):
            if path.is_file() and path.suffix in (".py", ".pyc", ".case", ".c", ".rpn", ".h"):
                files[str(path)] = path
    files[str(REPOSITORY / "pyproject.toml")] = REPOSITORY / "pyproject.toml"
    return files
