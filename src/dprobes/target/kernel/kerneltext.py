"""
The text of the running kernel, as it is in memory: patched for this processor, and with breakpoints that stand in it.

``/proc/kcore`` shows it as an ELF core file whose segments lie at the kernel's addresses. Lockdown closes it (integrity
forbids nothing here, confidentiality does), and so does the lack of CAP_SYS_RAWIO.
"""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dprobes.errors import reason_of
from dprobes.lazynamedtuple import NamedTuple
from dprobes.lazypattern import lazy_pattern

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.target.code.instructions import DecodedInstruction

__all__ = ["KCORE", "KernelText", "Segment", "Text", "open_text"]

KCORE = Path("/proc/kcore")

# Elf64_Ehdr: e_phoff at 32, e_phentsize and e_phnum at 54; Elf64_Phdr: type, flags, offset, vaddr, paddr, filesz
_PROGRAM_HEADERS = struct.Struct("=32xQ14xHH")
_PROGRAM_HEADER = struct.Struct("=IIQQQQ")
_PT_LOAD, _PT_NOTE = 1, 4

_NOTES_MAX = 1 << 20
_SHIFT = lazy_pattern(rb"^KERNELOFFSET=([0-9a-f]+)$", re.MULTILINE)
"""In the note VMCOREINFO (arch_crash_save_vmcoreinfo in arch/x86/kernel/crash_core_64.c or machine_kexec_64.c)."""

_IMAGES_START, _IMAGES_END = 0xFFFFFFFF80000000, 0xFFFFFFFFC0000000
"""Where the kernel's image lies somewhere, below all modules (Documentation/arch/x86/x86_64/mm.rst)."""


class Segment(NamedTuple):
    """A part of memory: ``size`` bytes from an address on, which are in the file from an offset on."""

    address: int
    size: int
    offset: int


class Text(Protocol):
    """What stands in the kernel's code, as far as this machine gives it."""

    def read(self, address: int, size: int) -> bytes:
        """Return up to ``size`` bytes from an address on; none if they cannot be read."""
        ...

    def problem_at(self, address: int) -> str | None:
        """Return as a clause why what is at an address cannot be read, None if it can."""
        ...

    def origin_of(self, address: int) -> str:
        """Return the file that code was read from, "" if it is what runs."""
        ...

    def is_patched(self, instruction: DecodedInstruction) -> bool:
        """Return whether another instruction may run in the place of one that was read here."""
        ...

    @property
    def shift(self) -> int | None:
        """How many bytes the kernel runs above where it was linked for (KASLR); None where that is not known."""
        ...


class KernelText:
    """The kernel's memory as a file; ``problem`` says as a clause why nothing can be read, None if it can."""

    def __init__(
        self,
        descriptor: int | None,
        segments: Sequence[Segment] = (),
        problem: str | None = None,
        shift: int | None = None,
    ) -> None:
        self._descriptor = descriptor
        self._segments = segments
        self.problem = problem
        self.shift = shift

    def read(self, address: int, size: int) -> bytes:
        """Return up to ``size`` bytes from an address on; none if they cannot be read."""
        if self._descriptor is None:
            return b""
        for segment in self._segments:
            if segment.address <= address < segment.address + segment.size:
                size = min(size, segment.address + segment.size - address)
                try:
                    return os.pread(self._descriptor, size, segment.offset + address - segment.address)
                except OSError:
                    return b""
        return b""

    def kernel_start(self) -> int | None:
        """Return where the kernel's image begins (``proc_kcore_text_init`` in fs/proc/kcore.c); None if not shown."""
        return next((s.address for s in self._segments if _IMAGES_START <= s.address < _IMAGES_END), None)

    def problem_at(self, address: int) -> str | None:
        """Return as a clause why what is at an address cannot be read, None if it can."""
        return self.problem or (None if self.read(address, 1) else f"{KCORE} does not have the address")

    def origin_of(self, _address: int) -> str:
        """Return nothing: this is what runs."""
        return ""

    def is_patched(self, _instruction: DecodedInstruction) -> bool:
        """Return False: this is what runs."""
        return False

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def open_text(path: Path = KCORE) -> KernelText:
    """Open the kernel's text; what keeps it from being read is in the ``problem`` of what is returned."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return KernelText(None, problem=f"{path} cannot be opened: {reason_of(error)}")
    try:
        header = os.pread(descriptor, 64, 0)
        offset, entry, count = _PROGRAM_HEADERS.unpack_from(header)
        table = os.pread(descriptor, entry * count, offset)
        segments = []
        shift = None
        for start in range(0, entry * count, entry):
            kind, _, place, address, _, size = _PROGRAM_HEADER.unpack_from(table, start)
            if kind == _PT_LOAD:
                segments.append(Segment(address, size, place))
            elif kind == _PT_NOTE and (found := _SHIFT.search(os.pread(descriptor, min(size, _NOTES_MAX), place))):
                shift = int(found[1], 16)
    except (OSError, struct.error) as error:
        os.close(descriptor)
        reason = f"cannot be read: {reason_of(error)}" if isinstance(error, OSError) else "is no core file"
        return KernelText(None, problem=f"{path} {reason}")
    return KernelText(descriptor, segments, shift=shift)
