"""
The layout of a core file: what the kernel would write for a process, from data that others have gathered.

Pure: knows no process and no system call. A file has these parts, the memory starting at page boundaries::

    ELF header | program headers | (section header) | notes: process, threads, files | memory of each segment

Sources: elf(5), core(5); ``include/uapi/linux/elfcore.h``, ``fs/binfmt_elf.c`` and ``fs/coredump.c`` of the kernel.
What differs between processors is in ``processors``.
"""

from __future__ import annotations

import enum
import signal
import struct
from dataclasses import field
from typing import TYPE_CHECKING

from dprobes.engines.core.notetypes import NoteType, owner_of
from dprobes.lazydataclass import dataclass
from dprobes.target.processmaps import PAGE_SIZE, parse_maps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.engines.core.processors import CoreProcessor
    from dprobes.target.processmaps import Mapping

__all__ = [
    "Area",
    "CoreLayout",
    "CoreProcess",
    "CoreThread",
    "Extent",
    "Note",
    "Segment",
    "extent",
    "notes",
    "parse_smaps",
    "place",
    "signal_info_at",
]


@dataclass(frozen=True, slots=True)
class Note:
    """Hold one note."""

    kind: NoteType
    data: bytes


@dataclass(frozen=True, slots=True)
class CoreThread:
    """Hold one thread; ``registers`` is the general set as the kernel gives it, ``more`` holds other register sets."""

    tid: int
    registers: bytes
    more: tuple[Note, ...] = ()
    pending: int = 0
    blocked: int = 0
    times: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Seconds of user and system time, of the thread and of the children that were waited for."""


@dataclass(frozen=True, slots=True)
class CoreProcess:
    """Hold what a core file says of the process as a whole; ``signal_info`` belongs to the first thread."""

    processor: CoreProcessor
    pid: int
    parent: int
    group: int
    session: int
    uid: int
    gid: int
    name: bytes
    arguments: bytes
    auxv: bytes
    signal_info: bytes
    nice: int = 0
    flags: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """Say that a mapping is in the file with its first ``size`` bytes."""

    start: int
    end: int
    permissions: str
    size: int


@dataclass(frozen=True, slots=True)
class CoreLayout:
    """Hold the file up to the memory, the place of each segment's memory, and the size of the whole."""

    head: bytes
    offsets: tuple[int, ...]
    size: int


# Which memory

_ANONYMOUS_PRIVATE, _ANONYMOUS_SHARED, _FILE_PRIVATE, _FILE_SHARED, _ELF_HEADERS, _HUGE_PRIVATE, _HUGE_SHARED = (
    1 << bit for bit in range(7)
)
"""The bits of ``/proc/PID/coredump_filter`` (core(5))."""


class Extent(enum.Enum):
    """Say how much of a mapping belongs into a core file."""

    NOTHING = "nothing"
    ELF_HEADER = "the first page, if it is the beginning of an ELF file"
    WHOLE = "everything"


@dataclass(frozen=True, slots=True)
class Area:
    """Hold a mapping with what ``/proc/PID/smaps`` adds: its flags, and sizes in bytes by name."""

    mapping: Mapping
    flags: frozenset[str] = frozenset()
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def is_private_anonymous(self) -> bool:
        """Whether a page that the process never touched can only be zero."""
        return not self.mapping.is_file and "sh" not in self.flags


def parse_smaps(text: str) -> Iterator[Area]:
    """Iterate over the mappings in the text of ``/proc/PID/smaps``, in order of addresses."""
    mapping: Mapping | None = None
    flags: frozenset[str] = frozenset()
    sizes: dict[str, int] = {}
    for line in text.split("\n"):
        key, _, value = line.partition(":")
        if not line or " " in key:  # the first line of the next one, or the end
            if mapping is not None:
                yield Area(mapping, flags, sizes)
            mapping, flags, sizes = (parse_maps(line)[0] if line else None), frozenset(), {}
        elif key == "VmFlags":
            flags = frozenset(value.split())
        elif value.endswith(" kB"):
            sizes[key] = int(value[:-3]) << 10


def extent(area: Area, wanted: int) -> Extent:
    """Return how much of a mapping is to be written; ``wanted`` is the process's ``coredump_filter``."""
    flags, mapping = area.flags, area.mapping
    shared = "sh" in flags
    if mapping.path == "[vdso]":
        return Extent.WHOLE
    if "dd" in flags or "io" in flags or "pf" in flags or mapping.path == "[vsyscall]":
        return Extent.NOTHING
    if "ht" in flags:
        bit = _HUGE_SHARED if shared else _HUGE_PRIVATE
    elif shared:
        bit = _ANONYMOUS_SHARED if mapping.deleted else _FILE_SHARED
    elif area.sizes.get("Anonymous") or area.sizes.get("Swap"):
        bit = _ANONYMOUS_PRIVATE
    elif not mapping.is_file:
        return Extent.NOTHING  # nobody has written there yet
    else:
        bit = _FILE_PRIVATE
        if not wanted & bit and wanted & _ELF_HEADERS and not mapping.offset and mapping.permissions[0] == "r":
            return Extent.ELF_HEADER
    return Extent.WHOLE if wanted & bit else Extent.NOTHING


# Notes

_PIDS = "iiii"
_TRAP_BRKPT = 1
_OVERFLOW_ID = 65534


def notes(process: CoreProcess, threads: Sequence[CoreThread], files: Sequence[Mapping]) -> bytes:
    """Return the notes of a core file; the first of ``threads`` is the one that a debugger shows first."""
    first, *others = threads
    whole = [
        Note(NoteType.PRPSINFO, _process_info(process)),
        Note(NoteType.SIGINFO, process.signal_info),
        Note(NoteType.AUXV, process.auxv),
    ]
    if files:
        whole.append(Note(NoteType.FILE, _file_table(process.processor, files)))
    order = process.processor.prefix
    parts = [_pack(order, Note(NoteType.PRSTATUS, _status(process, first)))]
    parts += [_pack(order, note) for note in (*whole, *first.more)]
    for thread in others:
        parts += [_pack(order, note) for note in (Note(NoteType.PRSTATUS, _status(process, thread)), *thread.more)]
    return b"".join(parts)


def signal_info_at(processor: CoreProcessor, address: int) -> bytes:
    """Return the ``siginfo_t`` of a breakpoint trap at an address, which is what the process has stopped for."""
    head = "iii4x" if processor.word_size == 8 else "iii"
    return struct.pack(f"{processor.prefix}{head}{processor.word}", signal.SIGTRAP, 0, _TRAP_BRKPT, address).ljust(
        128, b"\0"
    )


def _pack(order: str, note: Note) -> bytes:
    owner = owner_of(note.kind)
    head = struct.pack(f"{order}III", len(owner), len(note.data), note.kind)
    return head + _padded(owner) + _padded(note.data)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


def _status(process: CoreProcess, thread: CoreThread) -> bytes:
    """Return a ``struct elf_prstatus``; behind the registers comes ``pr_fpvalid``, padded to a whole word."""
    processor = process.processor
    size, word = processor.word_size, processor.word
    mask = (1 << 8 * size) - 1
    times = [part for seconds in thread.times for part in (int(seconds), int(seconds % 1 * 1_000_000))]
    # No signal: the process did not end by one, and goes on.
    head = struct.pack(
        f"{processor.prefix}iiihxx{word}{word}{_PIDS}8{word}",
        0, 0, 0, 0, thread.pending & mask, thread.blocked & mask,
        thread.tid, process.parent, process.group, process.session, *times,
    )  # fmt: skip
    registers = thread.registers[: processor.general_size].ljust(processor.general_size, b"\0")
    has_more = struct.pack(f"{processor.prefix}I", bool(thread.more)).ljust(size, b"\0")
    return head + registers + has_more


def _process_info(process: CoreProcess) -> bytes:
    """Return a ``struct elf_prpsinfo``."""
    processor = process.processor
    ids = [process.uid, process.gid]
    if processor.id_size == 2:
        ids = [number if number < 1 << 16 else _OVERFLOW_ID for number in ids]
    padding, id_word = "4x" if processor.word_size == 8 else "", "H" if processor.id_size == 2 else "I"
    return struct.pack(
        f"{processor.prefix}bcbb{padding}{processor.word}{id_word}{id_word}{_PIDS}16s80s",
        0, b"R", 0, process.nice, process.flags & 0xFFFFFFFF, *ids,
        process.pid, process.parent, process.group, process.session,
        process.name[:15], process.arguments[:79].rstrip(b"\0").replace(b"\0", b" "),
    )  # fmt: skip


def _file_table(processor: CoreProcessor, files: Sequence[Mapping]) -> bytes:
    numbers = [len(files), PAGE_SIZE]
    for mapping in files:
        numbers += [mapping.start, mapping.end, mapping.offset // PAGE_SIZE]
    names = b"".join(mapping.path.encode(errors="surrogateescape") + b"\0" for mapping in files)
    return struct.pack(f"{processor.prefix}{len(numbers)}{processor.word}", *numbers) + names


# Places

_HEADER = {8: "16sHHIQQQIHHHHHH", 4: "16sHHIIIIIHHHHHH"}
_PROGRAM_HEADER = {8: "IIQQQQQQ", 4: "IIIIIIII"}
_SECTION_HEADER = {8: "IIQQQQIIQQ", 4: "IIIIIIIIII"}
_ET_CORE, _PT_LOAD, _PT_NOTE = 4, 1, 4
_MANY = 0xFFFF  # PN_XNUM: the number of program headers stands in the section header


def place(processor: CoreProcessor, note_bytes: bytes, segments: Sequence[Segment]) -> CoreLayout:
    """Return the layout of a file with these notes and segments."""
    size = processor.word_size
    header, entry, section = (
        struct.Struct(processor.prefix + forms[size]) for forms in (_HEADER, _PROGRAM_HEADER, _SECTION_HEADER)
    )
    count = len(segments) + 1
    many = count >= _MANY
    section_offset = header.size + count * entry.size
    note_offset = section_offset + (section.size if many else 0)
    position = _to_page(note_offset + len(note_bytes))
    entries = [_program_header(entry, size, _PT_NOTE, 0, note_offset, 0, len(note_bytes), 0, 4)]
    offsets = []
    for segment in segments:
        offsets.append(position)
        flags = sum(bit for bit, letter in ((4, "r"), (2, "w"), (1, "x")) if letter in segment.permissions[:3])
        length = segment.end - segment.start
        entries.append(
            _program_header(entry, size, _PT_LOAD, flags, position, segment.start, segment.size, length, PAGE_SIZE)
        )
        position += _to_page(segment.size)
    identity = b"\x7fELF" + bytes([2 if size == 8 else 1, 1 if processor.order == "little" else 2, 1]) + bytes(9)
    head = header.pack(
        identity, _ET_CORE, processor.number, 1, 0, header.size, section_offset if many else 0, 0, header.size,
        entry.size, _MANY if many else count, section.size if many else 0, int(many), 0,
    )  # fmt: skip
    head += b"".join(entries)
    if many:
        head += section.pack(0, 0, 0, 0, 0, 1, 0, count, 0, 0)
    return CoreLayout(head + note_bytes, tuple(offsets), position)


def _program_header(
    entry: struct.Struct,
    word_size: int,
    kind: int,
    flags: int,
    offset: int,
    address: int,
    in_file: int,
    in_memory: int,
    align: int,
) -> bytes:
    if word_size == 8:
        return entry.pack(kind, flags, offset, address, 0, in_file, in_memory, align)
    return entry.pack(kind, offset, address, 0, in_file, in_memory, flags, align)


def _to_page(number: int) -> int:
    return -(-number // PAGE_SIZE) * PAGE_SIZE
