"""What handlers read is what the program has: registers and memory, compared with gdb, the program and its file."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.support import TIMEOUT, symbols_of

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner

GENERAL_64 = (
    "rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rbp", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15",
)  # fmt: skip
GENERAL_32 = ("eax", "ebx", "ecx", "edx", "esi", "edi", "ebp")
SEGMENTS = ("cs", "ss", "ds", "es", "fs", "gs")


def registers_in_gdb(program: Path, names: tuple[str, ...], flags: str) -> dict[str, int]:
    if shutil.which("gdb") is None:
        pytest.skip("gdb is not installed")
    shown = [argument for name in (*names, flags) for argument in ("-ex", f"info registers {name}")]
    output = subprocess.run(
        ["gdb", "-nx", "-batch", "-ex", "break *&here", "-ex", "run", *shown, str(program)],
        check=True,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    ).stdout
    return {name: int(value, 16) for name, value in re.findall(r"^(\w+) +0x([0-9a-f]+)", output, re.MULTILINE)}


@pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])
def test_registers_are_those_that_gdb_shows(build: Builder, run: Runner, i386: bool) -> None:
    program = build("registers32.S" if i386 else "registers.S", "-no-pie", i386=i386, name="registers")
    size, flags = (4, "eflags") if i386 else (8, "rflags")
    names = (GENERAL_32 if i386 else GENERAL_64) + SEGMENTS
    pushes = "".join(f"push r, {name}\n" for name in reversed(names))
    source = (
        f"name = registers\noffset = here\nminor = 1\npush r, {'esp' if i386 else 'rsp'}\npush r, {flags}\n"
        f"push r, {'eip' if i386 else 'rip'}\n{pushes}log {len(names) + 3}\nexit\n"
    )
    result = run.command(source, program)
    expected = registers_in_gdb(program, names, "eflags")
    mask = (1 << 8 * size) - 1
    assert len(result.records) == 3
    for words, record in zip(result.words(size=size), result.records, strict=True):
        assert dict(zip(names, words, strict=False)) == {name: expected[name] & mask for name in names}
        assert words[len(names) :] == [symbols_of(program)["here"], expected["eflags"], record["sp"]]


def look_at(handler: str) -> str:
    return f"name = memory\nautostacktrace = no\noffset = look\nminor = 1\n{handler}exit\n"


def test_strings_across_pages_and_at_the_end_of_a_page_are_read(build: Builder, run: Runner) -> None:
    result = run.command(look_at("push 6\npush r, arg0\nlog mrf\n"), build("memory.c"))
    across, ending, fault, *_ = (r["fields"]["arg0"] for r in result.records)
    assert (bytes(across), bytes(ending)) == (b"across", b"ending")
    assert fault.keys() == {"fault"}


def test_unreadable_memory_is_a_fault_item_with_its_address(build: Builder, run: Runner) -> None:
    result = run.command(look_at("push 6\npush r, arg0\nlog mrf\n"), build("memory.c"))
    pages = int(result.stdout.split()[0])
    assert result.records[2]["fields"]["arg0"] == {"fault": hex(pages + 2 * 4096)}


def test_code_under_a_breakpoint_reads_as_in_the_file(build: Builder, run: Runner) -> None:
    program = build("memory.c")
    result = run.command(look_at("push 16\npush look\nlog mrf\n"), program)
    data = program.read_bytes()
    start = symbols_of(program)["look"]  # the executable segment of a small PIE is mapped 1:1
    assert [bytes(r["fields"]["look"]) for r in result.records] == [data[start : start + 16]] * 4


@pytest.mark.parametrize("kind", ["-pie", "-no-pie"])
def test_a_pushed_symbol_is_its_run_time_address(build: Builder, run: Runner, kind: str) -> None:
    result = run.command(look_at("push look\nlog 1\n"), build("memory.c", kind))
    assert {words[0] for words in result.words()} == {int(result.stdout.split()[1])}
