"""Memory that is not there, or not all of it: compiled handlers see what the interpreter sees."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.rpn.instruction_encoding import encode
from dprobes.source_text import SourceFile
from dprobes.testing import PAGE, FakeContext, prepare
from dprobes.vm import Interpreter
from support.ebpf_backend import EbpfRunner, obstacle
from support.ebpf_world import libc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.vm import Outcome

AT = 0x20000
"""Two pages that are there; behind them is one without rights, and before them nothing."""

END = AT + 2 * PAGE
HIGH = 0xFFFF_F000
"""The last page of an i386 program's addresses."""

STATEMENTS = {
    "log mrf": "push {length}; push {address}; log mrf",
    "log str": "push {length}; push {address}; log str",
    "push mem, u8": "push {address}; push mem, u8; log 1",
    "push mem, u16": "push {address}; push mem, u16; log 1",
    "push mem, u32": "push {address}; push mem, u32; log 1",
    "push mem, u64": "push {address}; push mem, u64; log 1",
    "vfyr": "push {address}; vfyr; log 1",
}

ANYWHERE = [0, 1, AT - 1, AT, AT + PAGE - 3, END - 9, END - 8, END - 3, END - 1, END, END + 5, HIGH - 1, HIGH + 5]
ADDRESSES = {
    "i386": [*ANYWHERE, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFF9, 0xFFFF_FFFC, 0xFFFF_FFFF],
    # The page below the end of user space is where the kernel executes what uprobes replaced, if this process hit one.
    "x86_64": [*ANYWHERE, 0x7FFF_FFFF_F000, 0x8000_0000_0000, 0x1_0000_0000_0000,
               0xFFFF_7FFF_FFFF_FFFF, 0xFFFF_8000_0000_0000, 0xFFFF_FFFF_8100_0000, 0xFFFF_FFFF_FF60_0000,
               0xFFFF_FFFF_FFFF_F000, 0xFFFF_FFFF_FFFF_FFFA, 0xFFFF_FFFF_FFFF_FFFF, (1 << 63) - 1, 1 << 63],
}  # fmt: skip
LENGTHS = (0, 1, 9, 5000, 70000)


@pytest.fixture(scope="module", autouse=True)
def can_run() -> None:
    if (reason := obstacle()) is not None:
        pytest.skip(reason)


@pytest.fixture
def no_rights() -> Iterator[None]:
    """Map a page without rights behind the memory of the tests."""
    fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
    assert libc().mmap(END, PAGE, 0, fixed, -1, 0) == END
    yield
    libc().munmap(END, PAGE)


def outcomes(handler: str, context: FakeContext, *, sleepable: bool) -> tuple[Outcome, Outcome]:
    """Return what comes of a handler in the interpreter, and as eBPF."""
    text = f"name = x; logmax = 8000\noffset = 0; ex_mask = 0x1fff\nsx caught\n{handler}; exit\ncaught: log 3\n"
    program = parse_source(SourceFile("x.rpn", text), Diagnostics(), CompileOptions())
    target = context.architecture
    image = encode(program, target)
    hit = image.handlers[0], prepare(program, 0, context)
    with EbpfRunner(image, target, context, sleepable=sleepable) as runner:
        return Interpreter(image, target).run(*hit, context), runner.run(*hit)[0]


def world(name: str) -> FakeContext:
    letters = bytes(97 + n % 26 for n in range(2 * PAGE))
    high = {HIGH: b"H" * PAGE} if name == "i386" else {}
    return FakeContext(name, memory={AT: letters[:5000] + b"\0" + letters[5001:], **high})


@pytest.mark.usefixtures("no_rights")
@pytest.mark.parametrize("sleepable", [True, False])
@pytest.mark.parametrize("statement", STATEMENTS)
@pytest.mark.parametrize("name", ["i386", "x86_64"])
def test_the_first_byte_that_cannot_be_read_is_found(name: str, statement: str, sleepable: bool) -> None:
    context = world(name)
    for address in ADDRESSES[name]:
        for length in LENGTHS if statement.startswith("log") else (0,):
            handler = STATEMENTS[statement].format(address=address, length=length)
            expected, found = outcomes(handler, context, sleepable=sleepable)
            assert found == expected, (hex(address), length)


@pytest.fixture
def untouched(tmp_path: Path) -> Iterator[int]:
    """Map two pages of a file, the second one beyond its end, of which nothing is in memory; return where."""
    path = tmp_path / "file"
    path.write_bytes(b"paged in\0".ljust(PAGE, b"."))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        address = libc().mmap(None, 2 * PAGE, mmap.PROT_READ, mmap.MAP_PRIVATE, file.fileno(), 0)
    assert not resident(address)
    yield address
    libc().munmap(address, 2 * PAGE)


def resident(address: int) -> bool:
    """Return whether this process has the page at an address in its page table."""
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        entry = os.pread(file.fileno(), 8, address // PAGE * 8)
    return bool(entry[7] & 0x80)


READS = ["push {length}; push {address}; log mrf", "push {length}; push {address}; log str"]


@pytest.mark.parametrize("handler", READS)
def test_a_program_that_may_sleep_reads_pages_in(untouched: int, handler: str) -> None:
    context = FakeContext("x86_64")
    found = outcomes(handler.format(address=untouched, length=8), context, sleepable=True)[1]
    assert found.log[3:] == b"paged in"
    assert resident(untouched)


@pytest.mark.parametrize("handler", READS)
def test_one_that_may_not_takes_them_for_a_fault(untouched: int, handler: str) -> None:
    context = FakeContext("x86_64")
    expected, found = outcomes(handler.format(address=untouched, length=8), context, sleepable=False)
    assert found == expected
    assert not resident(untouched)


@pytest.mark.parametrize("sleepable", [True, False])
def test_what_lies_beyond_the_end_of_a_file_is_a_fault(untouched: int, sleepable: bool) -> None:
    ctypes.string_at(untouched, 1)
    context = FakeContext("x86_64")
    found = outcomes(f"push 200; push {untouched + PAGE - 100}; log mrf", context, sleepable=sleepable)[1]
    assert found.log == b"\xff\x08\x00" + (untouched + PAGE).to_bytes(8, "little") + b"".join(
        word.to_bytes(8, "little") for word in (1, untouched + PAGE, 0)
    )
