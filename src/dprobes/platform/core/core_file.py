"""
Layout of core files, as the kernel writes them.

``core_writer`` collects the data. This module accesses no process and makes no system call. A file has these parts;
memory starts at page boundaries::

    ELF header | program headers | (section header) | notes: process, threads, files | memory of each segment

Sources: elf(5), core(5); ``include/uapi/linux/elfcore.h``, ``fs/binfmt_elf.c`` and ``fs/coredump.c`` of the kernel. The
table ``PROCESSORS`` has the differences between processors.
"""

from __future__ import annotations

import enum
import signal
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from dprobes.target.process_maps import PAGE_SIZE, parse_maps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dprobes.target.process_maps import Mapping

__all__ = [
    "PROCESSORS",
    "Area",
    "CoreProcess",
    "CoreProcessor",
    "CoreThread",
    "Extent",
    "Note",
    "NoteType",
    "RegisterField",
    "Segment",
    "extent",
    "image_of",
    "notes",
    "parse_smaps",
    "place",
    "signal_info_at",
]


class NoteType(enum.IntEnum):
    """Types of notes in a core file (``include/uapi/linux/elf.h``)."""

    PRSTATUS = 1
    PRFPREG = 2
    PRPSINFO = 3
    AUXV = 6
    SIGINFO = 0x53494749
    FILE = 0x46494C45
    TLS_386 = 0x200
    XSTATE = 0x202
    VXRS_LOW_S390 = 0x309
    VXRS_HIGH_S390 = 0x30A
    PRXFPREG = 0x46E62B7F


_OF_CORE = (
    NoteType.PRSTATUS,
    NoteType.PRFPREG,
    NoteType.PRPSINFO,
    NoteType.AUXV,
    NoteType.SIGINFO,
    NoteType.FILE,
)


def owner_of(kind: NoteType) -> bytes:
    """Return the owner's name, with its NUL, for a note of this type in a core file."""
    return b"CORE\0" if kind in _OF_CORE else b"LINUX\0"


class RegisterField(NamedTuple):
    """
    Register in a note of a core file: its size in bytes and its possible names. Padding has no name.

    The names are those of GDB's target descriptions (GDB manual, appendix G.5); a stub knows the register by one of
    them. If ``is_abridged`` is True, the register is the x87's tag word in the form of FXSAVE, with one bit for each
    register instead of two.

    Sources: ``elf_gregset_t`` and ``elf_fpregset_t`` in ``arch/*/include/uapi/asm`` of the kernel (ptrace.h, elf.h),
    ``e_machine`` in ``include/uapi/linux/elf-em.h``.
    """

    names: tuple[str, ...]
    size: int
    is_abridged: bool = False


@dataclass(frozen=True, slots=True)
class CoreProcessor:
    """
    Layout of the core files of one processor.

    ``number`` is the value of ``e_machine``, and ``id_size`` the size of a user id in bytes. ``general`` lists the
    registers of NT_PRSTATUS. ``more`` lists those of other notes, with the types of the notes.
    """

    number: int
    word_size: Literal[4, 8]
    order: Literal["little", "big"]
    general: Sequence[RegisterField]
    more: Sequence[tuple[NoteType, Sequence[RegisterField]]]
    id_size: int = 4

    @property
    def prefix(self) -> str:
        """The byte order in formats of ``struct``."""
        return "<" if self.order == "little" else ">"

    @property
    def word(self) -> str:
        """The format of an unsigned word in ``struct``."""
        return "Q" if self.word_size == 8 else "I"

    @property
    def general_size(self) -> int:
        """The size of the general registers in bytes."""
        return sum(field.size for field in self.general)


def image_of(
    fields: Sequence[RegisterField], order: Literal["little", "big"], read: Callable[[str], int | None]
) -> bytes:
    """
    Return the registers ``fields`` as the contents of a note in a core file.

    ``read`` returns the value of a register by name. A register for which it returns None becomes 0.
    """
    image = bytearray()
    for place in fields:
        value = next((found for found in map(read, place.names) if found is not None), 0)
        if place.is_abridged:
            value = sum(1 << n for n in range(8) if value >> 2 * n & 3 != _EMPTY)
        image += (value & (1 << 8 * place.size) - 1).to_bytes(place.size, order)
    return bytes(image)


_EMPTY = 3
"""Two-bit tag of an empty x87 register."""


def _fields(text: str, size: int) -> tuple[RegisterField, ...]:
    """
    Return a register of ``size`` bytes for each word of a string.

    A word is the possible names, separated by slashes, or ``-`` for padding.
    """
    return tuple(RegisterField(() if word == "-" else tuple(word.split("/")), size) for word in text.split())


def _numbered(name: str, count: int) -> str:
    return " ".join(f"{name}{n}" for n in range(count))


def _padding(size: int) -> RegisterField:
    return RegisterField((), size)


def _fxsave(pointers: Sequence[RegisterField], vectors: int) -> tuple[RegisterField, ...]:
    """Return the registers in the order of FXSAVE (Intel SDM, volume 1, table 10-2)."""
    head = (*_fields("fctrl fstat", 2), RegisterField(("ftag",), 2, is_abridged=True), *_fields("fop", 2))
    stack = tuple(part for n in range(8) for part in (RegisterField((f"st{n}",), 10), _padding(6)))
    control = (*_fields("mxcsr", 4), _padding(4))
    registers = (*head, *pointers, *control, *stack, *_fields(_numbered("xmm", vectors), 16))
    return (*registers, _padding(_FXSAVE_SIZE - sum(field.size for field in registers)))


_FXSAVE_SIZE = 512
_AMD64 = (
    "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss "
    "fs_base gs_base ds es fs gs"
)
_I386 = "ebx ecx edx esi edi ebp eax ds es fs gs orig_eax eip cs eflags esp ss"
_RISCV = "pc ra sp gp tp t0 t1 t2 fp/s0 s1 a0 a1 a2 a3 a4 a5 a6 a7 s2 s3 s4 s5 s6 s7 s8 s9 s10 s11 t3 t4 t5 t6"
_RISCV_FLOATING = (
    "ft0 ft1 ft2 ft3 ft4 ft5 ft6 ft7 fs0 fs1 fa0 fa1 fa2 fa3 fa4 fa5 fa6 fa7 "
    "fs2 fs3 fs4 fs5 fs6 fs7 fs8 fs9 fs10 fs11 ft8 ft9 ft10 ft11 fcsr"
)
_POWER = f"{_numbered('r', 32)} pc msr orig_r3 ctr lr xer cr - trap {'- ' * 7}"
_POWER_FLOATING = _fields(f"{_numbered('f', 32)} fpscr", 8)


def _zseries(word: int) -> tuple[RegisterField, ...]:
    words, accesses = _fields(f"pswm pswa {_numbered('r', 16)}", word), _fields(_numbered("acr", 16), 4)
    return (*words, *accesses, *_fields("orig_r2", word))


_ZSERIES_FLOATING = (*_fields("fpc", 4), _padding(4), *_fields(_numbered("f", 16), 8))

_VECTORS_LOW = _fields(" ".join(f"v{n}l" for n in range(16)), 8)
_VECTORS_HIGH = _fields(" ".join(f"v{n}" for n in range(16, 32)), 16)
_I387 = (*_fields("fctrl fstat ftag fioff fiseg fooff foseg", 4), *_fields(_numbered("st", 8), 10))
# A vector register of SVE begins with the shorter one of Advanced SIMD.
_A64_FLOATING = (*(RegisterField((f"v{n}", f"z{n}"), 16) for n in range(32)), *_fields("fpsr fpcr", 4), _padding(8))

PROCESSORS = {
    "x86_64": CoreProcessor(
        62, 8, "little", _fields(_AMD64, 8), ((NoteType.PRFPREG, _fxsave(_fields("fioff fooff", 8), 16)),)
    ),
    "i386": CoreProcessor(
        3,
        4,
        "little",
        _fields(_I386, 4),
        ((NoteType.PRFPREG, _I387), (NoteType.PRXFPREG, _fxsave(_fields("fioff fiseg fooff foseg", 4), 8))),
        id_size=2,
    ),
    "aarch64": CoreProcessor(
        183,
        8,
        "little",
        _fields(f"{_numbered('x', 31)} sp pc cpsr", 8),
        ((NoteType.PRFPREG, _A64_FLOATING),),
    ),
    "riscv64": CoreProcessor(243, 8, "little", _fields(_RISCV, 8), ((NoteType.PRFPREG, _fields(_RISCV_FLOATING, 8)),)),
    "ppc64": CoreProcessor(21, 8, "big", _fields(_POWER, 8), ((NoteType.PRFPREG, _POWER_FLOATING),)),
    "ppc": CoreProcessor(20, 4, "big", _fields(_POWER, 4), ((NoteType.PRFPREG, _POWER_FLOATING),)),
    "s390x": CoreProcessor(
        22,
        8,
        "big",
        _zseries(8),
        (
            (NoteType.PRFPREG, _ZSERIES_FLOATING),
            (NoteType.VXRS_LOW_S390, _VECTORS_LOW),
            (NoteType.VXRS_HIGH_S390, _VECTORS_HIGH),
        ),
    ),
    "s390": CoreProcessor(22, 4, "big", _zseries(4), ((NoteType.PRFPREG, _ZSERIES_FLOATING),), id_size=2),
}
"""Processors by the names of their architectures."""


@dataclass(frozen=True, slots=True)
class Note:
    """Note of a core file: its type, and its contents."""

    kind: NoteType
    data: bytes


@dataclass(frozen=True, slots=True)
class CoreThread:
    """
    State of a thread in a core file.

    ``registers`` is an ``elf_gregset_t``; ``more`` has the notes with the other register sets. ``pending`` and
    ``blocked`` are signal sets, in which bit n - 1 is signal n.
    """

    tid: int
    registers: bytes
    more: tuple[Note, ...] = ()
    pending: int = 0
    blocked: int = 0
    times: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """User and system time of the thread, then of its waited-for children, in seconds (pr_utime to pr_cstime)."""


@dataclass(frozen=True, slots=True)
class CoreProcess:
    """
    State of a process for a core file, apart from threads and memory.

    ``signal_info`` is the ``siginfo_t`` of the first thread's signal.
    """

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
    """Mapping from ``start`` to ``end`` (excluded), of which the core file contains the first ``size`` bytes."""

    start: int
    end: int
    permissions: str
    size: int


@dataclass(frozen=True, slots=True)
class CoreLayout:
    """Layout of a core file: its bytes before the memory, each segment's offset and the size of the file, in bytes."""

    head: bytes
    offsets: tuple[int, ...]
    size: int


# Memory to be written

_ANONYMOUS_PRIVATE, _ANONYMOUS_SHARED, _FILE_PRIVATE, _FILE_SHARED, _ELF_HEADERS, _HUGE_PRIVATE, _HUGE_SHARED = (
    1 << bit for bit in range(7)
)
"""Bits of ``/proc/PID/coredump_filter`` (core(5))."""


class Extent(enum.Enum):
    """Part of a mapping that is written to a core file."""

    NOTHING = "nothing"
    ELF_HEADER = "the first page, if it is the beginning of an ELF file"
    WHOLE = "everything"


@dataclass(frozen=True, slots=True)
class Area:
    """Mapping with its additional data in ``/proc/PID/smaps``: its flags, and sizes in bytes by name."""

    mapping: Mapping
    flags: frozenset[str] = frozenset()
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def is_private_anonymous(self) -> bool:
        """True if the mapping is private and has no file, so that a page that was never written is all zeros."""
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
    """
    Return the part of a mapping that the kernel would dump.

    ``wanted`` is the bit mask of ``/proc/PID/coredump_filter`` (core(5)).
    """
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
        return Extent.NOTHING  # the process has not written there yet
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
    """
    Return the note segment of a core file: process, threads and mapped files.

    Debuggers select the first one of ``threads``, which must not be empty.
    """
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
    """Return the ``siginfo_t`` of a breakpoint trap at an address, the reason for the stop of the process."""
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
    """
    Return the contents of a thread's NT_PRSTATUS note, a ``struct elf_prstatus``.

    ``pr_fpvalid`` follows the registers, padded to a whole word.
    """
    processor = process.processor
    size, word = processor.word_size, processor.word
    mask = (1 << 8 * size) - 1
    times = [part for seconds in thread.times for part in (int(seconds), int(seconds % 1 * 1_000_000))]
    # No signal: the process was not ended by one, and continues.
    head = struct.pack(
        f"{processor.prefix}iiihxx{word}{word}{_PIDS}8{word}",
        0, 0, 0, 0, thread.pending & mask, thread.blocked & mask,
        thread.tid, process.parent, process.group, process.session, *times,
    )  # fmt: skip
    registers = thread.registers[: processor.general_size].ljust(processor.general_size, b"\0")
    has_more = struct.pack(f"{processor.prefix}I", bool(thread.more)).ljust(size, b"\0")
    return head + registers + has_more


def _process_info(process: CoreProcess) -> bytes:
    """Return the contents of the NT_PRPSINFO note, a ``struct elf_prpsinfo``."""
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
_MANY = 0xFFFF  # PN_XNUM: the number of program headers is in the section header


def place(processor: CoreProcessor, note_bytes: bytes, segments: Sequence[Segment]) -> CoreLayout:
    """Return the layout of a core file for a note segment with these bytes, and memory segments."""
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
