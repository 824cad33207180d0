"""Type information (BTF) of the running kernel, which the first look-up opens."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from typing import TYPE_CHECKING, Self

from dprobes.cache_files import cache_directory, read_cached, write_cached
from dprobes.record.boot_clock import BOOT_ID
from dprobes.target.btf import KERNEL_BTF, Btf, Kind

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dprobes.target.btf import Signature

__all__ = ["KERNEL_BTF", "KeptAnswers", "KernelTypes"]


class KeptAnswers:
    """
    Cache of numbers about the running kernel, in the file ``name``, which is valid until the next boot.

    The file is text: the kernel's boot id, then lines of a key and a number. If the file cannot be read or written, the
    cache is empty. ``directory`` is by default the user's cache directory.
    """

    def __init__(self, name: str, directory: Path | None = None) -> None:
        self._directory = cache_directory() if directory is None else str(directory)
        self._name = name
        self._known: dict[str, int] | None = None
        self._boot = ""

    def get(self, key: str) -> int | None:
        """Return the cached number of a key, None if there is none."""
        return self._read().get(key)

    def add(self, key: str, number: int) -> None:
        """Add a number to the cache, and write the file."""
        known = self._read()
        known[key] = number
        if self._boot:
            lines = [self._boot, *(f"{one} {value}" for one, value in known.items())]
            write_cached(self._directory, self._name, ("\n".join(lines) + "\n").encode())

    def _read(self) -> dict[str, int]:
        if self._known is None:
            self._known = {}
            with contextlib.suppress(OSError, ValueError):
                self._boot = BOOT_ID.read_text().strip()
                boot, *lines = (read_cached(self._directory, self._name) or b"").decode().splitlines()
                if boot == self._boot:
                    pairs = (line.rsplit(" ", 1) for line in lines)
                    self._known = {key: int(number) for key, number in pairs}
        return self._known


def _contents(path: str) -> bytes | mmap.mmap:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Since Linux kernel commit a539e2a6d51d ("btf: Allow mmap of vmlinux btf") (in v6.16).
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
    except OSError:
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


class KernelTypes:
    """
    Types of the running kernel; see ``Btf`` for the results of the methods.

    The methods raise OSError if the kernel's BTF cannot be read (FileNotFoundError: the kernel was built without BTF),
    and ``TargetError`` if it lacks a type or member. The look-ups of a start take some 10 ms, so results are cached
    until the next boot, except with another ``path``. Any thread may call the methods, including ``close``.
    """

    def __init__(self, path: str = KERNEL_BTF) -> None:
        self._path = path
        self._answers = KeptAnswers("kernel-types") if path == KERNEL_BTF else None
        self._btf: Btf | None = None
        self._close_data: Callable[[], None] | None = None
        self._lock = threading.RLock()

    def _opened(self) -> Btf:
        if self._btf is None:
            data = _contents(self._path)
            self._btf = Btf(data)
            if isinstance(data, mmap.mmap):
                self._close_data = data.close
        return self._btf

    def require(self) -> None:
        """Raise OSError if the kernel's BTF cannot be read; this takes less time than a look-up."""
        with self._lock:
            self._opened()

    def find(self, kind: Kind, name: str) -> int:
        """Return the id of a type."""
        return self._answer(f"{kind.name} {name}", lambda: self._opened().find(kind, name))

    def member_offset(self, composite: str, path: str) -> int:
        """Return the offset of a member of a structure, in bytes."""
        return self._answer(f"{composite}.{path}", lambda: self._opened().member_offset(composite, path))

    def signature(self, function: str) -> Signature | None:
        """Return the signature of a function; None if its arguments are not a fixed number of words."""
        with self._lock:
            return self._opened().signature(function)

    def _answer(self, question: str, look_up: Callable[[], int]) -> int:
        with self._lock:
            if self._answers is None:
                return look_up()
            number = self._answers.get(question)
            if number is None:
                number = look_up()
                self._answers.add(question, number)
            return number

    def tracepoint(self, name: str) -> int:
        """Return the BTF id of a tracepoint's typedef, by which a TRACING program is loaded for the tracepoint."""
        return self.find(Kind.TYPEDEF, f"btf_trace_{name}")

    def close(self) -> None:
        """Release the BTF; a later look-up opens it again."""
        with self._lock:
            if self._btf is not None:
                self._btf.close()
                self._btf = None
            if self._close_data is not None:
                self._close_data()
                self._close_data = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
