"""Core files: which memory belongs into them, and their layout against the C compiler's and readelf's view."""

from __future__ import annotations

import shutil
import struct
import subprocess
from typing import TYPE_CHECKING, Literal

import pytest

from dprobes.platform.core.core_file import (
    PROCESSORS,
    Area,
    CoreProcess,
    CoreThread,
    Extent,
    Note,
    NoteType,
    Segment,
    extent,
    notes,
    parse_smaps,
    place,
)
from dprobes.target.process_maps import PAGE_SIZE, parse_maps

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.platform.core.core_file import CoreProcessor

SMAPS = """\
55d0e0a00000-55d0e0a01000 r--p 00000000 fe:01 42                         /usr/bin/a: b
Size:                  4 kB
Rss:                   4 kB
Anonymous:             0 kB
Swap:                  0 kB
ProtectionKey:         0
VmFlags: rd mr mw me sd
55d0e0b00000-55d0e0b21000 rw-p 00000000 00:00 0                          [heap]
Size:                132 kB
Anonymous:             8 kB
VmFlags: rd wr mr mw me ac sd
"""


def area(line: str, flags: str = "", **sizes: int) -> Area:
    (mapping,) = parse_maps(f"1000-3000 {line}\n")
    return Area(mapping, frozenset(flags.split()), sizes)


def test_smaps_give_flags_and_sizes() -> None:
    first, second = parse_smaps(SMAPS)
    assert first.mapping.path == "/usr/bin/a: b"
    assert first.flags == {"rd", "mr", "mw", "me", "sd"}
    assert first.sizes["Rss"] == 4096
    assert (second.mapping.start, second.mapping.path) == (0x55D0E0B00000, "[heap]")
    assert second.sizes["Anonymous"] == 8192
    assert second.is_private_anonymous
    assert not first.is_private_anonymous


FILE = "r-xp 00000000 fe:01 42 /usr/bin/a"
LATER = "r--p 00001000 fe:01 42 /usr/bin/a"
HEAP = "rw-p 00000000 00:00 0 [heap]"
SHARED = "rw-s 00000000 fe:01 42 /tmp/shared"
MEMFD = "rw-s 00000000 00:01 42 /memfd:x (deleted)"
HUGE = "rw-p 00000000 00:0e 42 /anon_hugepage (deleted)"


@pytest.mark.parametrize(
    ("what", "bits", "expected"),
    [
        (area(FILE), 0x33, Extent.ELF_HEADER),
        (area(FILE), 0x23, Extent.NOTHING),
        (area(FILE), 0x37, Extent.WHOLE),
        (area(LATER), 0x33, Extent.NOTHING),
        (area(FILE, Anonymous=4096), 0x33, Extent.WHOLE),  # its pages were written to
        (area(FILE, Swap=4096), 0x33, Extent.WHOLE),
        (area(HEAP, Anonymous=4096), 0x33, Extent.WHOLE),
        (area(HEAP, Anonymous=4096), 0x32, Extent.NOTHING),
        (area(HEAP), 0x33, Extent.NOTHING),  # never touched
        (area(HEAP, "dd", Anonymous=4096), 0x7F, Extent.NOTHING),  # MADV_DONTDUMP
        (area("rw-s 00000000 00:06 42 /dev/mem", "sh io pf"), 0x7F, Extent.NOTHING),
        (area(SHARED, "sh"), 0x33, Extent.NOTHING),
        (area(SHARED, "sh"), 0x3B, Extent.WHOLE),
        (area(MEMFD, "sh"), 0x33, Extent.WHOLE),
        (area(MEMFD, "sh"), 0x31, Extent.NOTHING),
        (area(HUGE, "ht"), 0x33, Extent.WHOLE),
        (area(HUGE, "ht"), 0x13, Extent.NOTHING),
        (area(HUGE, "ht sh"), 0x40, Extent.WHOLE),
        (area("r-xp 00000000 00:00 0 [vdso]", "de"), 0, Extent.WHOLE),
        (area("r--p 00000000 00:00 0 [vvar]", "io dd pf"), 0x7F, Extent.NOTHING),
        (area("--xp 00000000 00:00 0 [vsyscall]"), 0x7F, Extent.NOTHING),
    ],
)
def test_what_belongs_into_a_core_file(what: Area, bits: int, expected: Extent) -> None:
    assert extent(what, bits) is expected


X86 = {8: PROCESSORS["x86_64"], 4: PROCESSORS["i386"]}


def process(processor: CoreProcessor) -> CoreProcess:
    auxv = bytes(2 * processor.word_size)
    return CoreProcess(
        processor, 100, 1, 100, 99, 70000, 7, b"a name that is too long", b"arg\0two\0", auxv, bytes(128)
    )


def split(data: bytes, order: str = "<") -> dict[int, bytes]:
    found = {}
    position = 0
    while position < len(data):
        owner, size, kind = struct.unpack_from(f"{order}III", data, position)
        position += 12 + owner + -owner % 4
        found[kind] = data[position : position + size]
        position += size + -size % 4
    return found


KERNEL_TIMES = ("-U_TIME_BITS", "-U_FILE_OFFSET_BITS")
"""The kernel writes times of one word; compilers of Debian 13 define 64-bit times for 32-bit programs."""
C_PROGRAM = """
#include <sys/procfs.h>
#include <stddef.h>
unsigned sizes[] = { sizeof(prstatus_t), offsetof(prstatus_t, pr_reg), offsetof(prstatus_t, pr_pid),
    offsetof(prstatus_t, pr_sighold), offsetof(prstatus_t, pr_utime), sizeof(prpsinfo_t),
    offsetof(prpsinfo_t, pr_uid), offsetof(prpsinfo_t, pr_fname), offsetof(prpsinfo_t, pr_psargs),
    sizeof(elf_gregset_t), sizeof(elf_fpregset_t) };
"""


COMPILERS = {
    "x86_64": "gcc",
    "i386": "i686-linux-gnu-gcc",
    "aarch64": "aarch64-linux-gnu-gcc",
    "riscv64": "riscv64-linux-gnu-gcc",
    "ppc64": "powerpc64-linux-gnu-gcc",
    "ppc": "powerpc-linux-gnu-gcc",
    "s390x": "s390x-linux-gnu-gcc",
}


@pytest.mark.parametrize("name", COMPILERS)
def test_notes_are_laid_out_as_the_c_library_declares(tmp_path: Path, name: str) -> None:
    compiler, processor = COMPILERS[name], PROCESSORS[name]
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    (tmp_path / "sizes.c").write_text(C_PROGRAM)
    objcopy = compiler.removesuffix("gcc") + "objcopy"
    subprocess.run([compiler, *KERNEL_TIMES, "-c", "sizes.c"], cwd=tmp_path, check=True)
    subprocess.run([objcopy, "-O", "binary", "-j", ".data", "sizes.o", "sizes"], cwd=tmp_path, check=True)
    order, word_size = processor.prefix, processor.word_size
    size, registers, pid, held, user, info, uid, called, arguments, general, floating = struct.unpack(
        f"{order}11I", (tmp_path / "sizes").read_bytes()
    )

    more = (Note(NoteType.PRFPREG, b"fp"),)
    thread = CoreThread(101, b"\x11" * general, more, pending=2, blocked=0x4000, times=(1.5, 0, 0, 0))
    found = split(notes(process(processor), [thread], []), order)
    status, whole = found[NoteType.PRSTATUS], found[NoteType.PRPSINFO]
    assert len(status) == size
    assert (
        status[registers - 1 : registers + general + 1] == b"\0" + b"\x11" * general + status[registers + general :][:1]
    )
    assert struct.unpack_from(f"{order}i", status, pid) == (101,)
    assert struct.unpack_from(f"{order}{processor.word}", status, held) == (0x4000,)
    layout = "qq" if word_size == 8 else "ii"
    assert struct.unpack_from(f"{order}{layout}", status, user) == (1, 500_000)
    assert struct.unpack_from(f"{order}I", status, registers + general) == (1,)  # pr_fpvalid
    assert len(whole) == info
    number, form = (65534, "H") if name == "i386" else (70000, "I")
    assert struct.unpack_from(f"{order}{form}", whole, uid) == (number,)
    assert whole[called : called + 16] == b"a name that is \0"
    assert whole[arguments:].rstrip(b"\0") == b"arg two"
    assert found[NoteType.PRFPREG] == b"fp"
    sets = dict(processor.more)
    # The kernel leaves out what is behind fcsr.
    assert sum(field.size for field in sets[NoteType.PRFPREG]) == (floating if name != "riscv64" else 33 * 8)


def readelf(option: str, path: Path) -> str:
    done = subprocess.run(["readelf", "-W", option, str(path)], check=True, capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("word_size", [4, 8])
def test_segments_lie_where_the_program_headers_say(tmp_path: Path, word_size: Literal[4, 8]) -> None:
    (mapping,) = parse_maps("10000-14000 r-xp 00002000 fe:01 42 /usr/bin/a\n")
    segments = [Segment(0x10000, 0x14000, "r-xp", PAGE_SIZE), Segment(0x20000, 0x22000, "rw-p", 2 * PAGE_SIZE)]
    head_notes = notes(process(X86[word_size]), [CoreThread(1, b"")], [mapping])
    layout = place(X86[word_size], head_notes, segments)
    path = tmp_path / "core"
    path.write_bytes(layout.head.ljust(layout.size, b"\0"))
    rows = [line.split() for line in readelf("-l", path).splitlines() if " LOAD " in line]
    assert [[int(n, 16) for n in (row[1], row[2], row[4], row[5])] for row in rows] == [
        [layout.offsets[0], 0x10000, PAGE_SIZE, 0x4000],
        [layout.offsets[1], 0x20000, 2 * PAGE_SIZE, 0x2000],
    ]
    assert ["".join(row[6:-1]) for row in rows] == ["RE", "RW"]
    assert layout.size == layout.offsets[1] + 2 * PAGE_SIZE
    assert all(offset % PAGE_SIZE == 0 for offset in layout.offsets)
    table = split(head_notes)[NoteType.FILE]
    word = "Q" if word_size == 8 else "I"
    assert struct.unpack_from(f"5{word}", table) == (1, PAGE_SIZE, 0x10000, 0x14000, 2)
    assert table.endswith(b"/usr/bin/a\0")


@pytest.mark.parametrize("word_size", [4, 8])
def test_more_segments_than_the_header_can_count(tmp_path: Path, word_size: Literal[4, 8]) -> None:
    segments = [Segment(n * 2 * PAGE_SIZE, n * 2 * PAGE_SIZE + PAGE_SIZE, "rw-p", 0) for n in range(1, 66001)]
    layout = place(X86[word_size], notes(process(X86[word_size]), [CoreThread(1, b"")], []), segments)
    path = tmp_path / "core"
    path.write_bytes(layout.head.ljust(layout.size, b"\0"))
    assert "Number of program headers:         65535 (66001)" in readelf("-h", path)
