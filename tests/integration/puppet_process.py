"""
A process that goes through an instruction with registers and memory that are made up (``programs/puppet.c``).

What cannot be made up there is what the processor and the kernel alone set: the instruction pointer, ``cs``, ``ss``,
some flags, and who the process is.
"""

from __future__ import annotations

import os
import select
import struct
import subprocess
from typing import TYPE_CHECKING, Self

from dprobes.testing import PAGE
from integration.support import TIMEOUT, symbols_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence
    from pathlib import Path

__all__ = ["FIXED_FLAGS", "FREE_FLAGS", "SELECTORS", "TAKEN", "PuppetProcess"]

TAKEN = {
    8: ("eflags", "eax", "ebx", "ecx", "edx", "esi", "edi", "ebp", *(f"r{n}" for n in range(8, 16)), "esp"),
    4: ("eflags", "eax", "ebx", "ecx", "edx", "esi", "edi", "ebp", "esp"),
}
"""The registers that the stub takes, in its order, by the size of a word."""

SELECTORS = {8: (0x33, 0x2B), 4: (0x23, 0x2B)}
"""``cs`` and ``ss`` of user code (arch/x86/include/asm/segment.h)."""

FREE_FLAGS, FIXED_FLAGS = 0xCD5, 0x202
"""The flags that code may set as it likes (no trap flag), and those that are always set: bit 1 and interrupts."""


class PuppetProcess:
    """Own the process; leaving the context manager ends it. ``addresses`` are those of its sites, ``data`` of data."""

    def __init__(self, program: Path, *, reports: bool = False) -> None:
        self.path = str(program)
        self._reports = reports
        command = [self.path, *(["report"] if reports else [])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self.pid = self._process.pid
        self.cpu = min(os.sched_getaffinity(self.pid))
        os.sched_setaffinity(self.pid, {self.cpu})
        symbols = symbols_of(program)
        # The only thing that is read through the buffer: nothing comes behind it before the first hit.
        self.addresses = [int(address, 16) for address in self._output.readline().split()]
        self.data = self.addresses[0] + symbols["data"] - symbols["first_site"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate(timeout=TIMEOUT)

    def hit(
        self, site: int, registers: Sequence[int], pages: Mapping[int, bytes | bytearray], read_only: Container[int]
    ) -> None:
        """Go through a site with these flags and registers, and pages by their numbers."""
        message = [struct.pack(f"={len(registers)}QII", *registers, site, len(pages))]
        for page, data in pages.items():
            message += (struct.pack("=QQ", page * PAGE, page in read_only), bytes(data))
        self._input.write(b"".join(message))
        self._input.flush()
        assert self._read(1) == b"y", "the puppet cannot have this memory"

    def report(self, pages: Iterable[int], word_size: int = 8) -> tuple[dict[str, int], dict[int, bytes]]:
        """Return what the registers and pages of a hit were behind the site, if the process reports them."""
        assert self._reports
        names = TAKEN[word_size]
        values = struct.unpack(f"={len(names)}{'Q' if word_size == 8 else 'I'}", self._read(word_size * len(names)))
        return dict(zip(names, values, strict=True)), {page: self._read(PAGE) for page in pages}

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            assert select.select([self._output], [], [], TIMEOUT)[0], "the puppet has stopped"
            part = os.read(self._output.fileno(), size - len(data))
            assert part, "the puppet has ended"
            data += part
        return data
