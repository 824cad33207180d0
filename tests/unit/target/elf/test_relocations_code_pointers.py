"""Which words of a file's data lead into its code, against what nm says of the functions and labels that they name."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.elf.relocations import code_pointers, restartable_sections, written_words

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

SOURCE = """
static int first(int n) { return n + 1; }
static int second(int n) { return n + 2; }
int (*const table[])(int) = {first, second};
int (*changed)(int) = second;
static const char *name = "text";
int computed(int n) {
    static const void *const labels[] = {&&one, &&two};
    goto *labels[n & 1];
one: __asm__ volatile(".globl label_one\\nlabel_one:"); return n + 3;
two: __asm__ volatile(".globl label_two\\nlabel_two:"); return n + (name != 0);
}
int main(int n, char **arguments) { return table[n & 1](n) + changed(n) + computed(n); }
"""
SEQUENCE = """
.text
.globl inc
.type inc, @function
inc:
  lea described(%rip), %rax
begin:
  mov %rax, %rcx
  addq $1, (%rdi)
finish:
  ret
.long 0x53053053
abort:
  jmp inc
.section __rseq_cs, "aw"
.balign 32
described:
.long 0, 0
.quad begin, finish - begin, abort
"""


def built(tmp_path: Path, name: str, source: str, *flags: str) -> tuple[ElfFile, dict[str, int]]:
    (tmp_path / name).write_text(source)
    subprocess.run(["gcc", "-o", tmp_path / "x", tmp_path / name, *flags], check=True)
    names = subprocess.run(["nm", tmp_path / "x"], check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in names.splitlines()]
    return ElfFile.open(tmp_path / "x"), {row[2]: int(row[0], 16) for row in rows if len(row) == 3}


@pytest.mark.parametrize(
    "flags",
    [("-pie", "-fPIE"), ("-no-pie", "-fno-pie"), ("-static",), ("-pie", "-fPIE", "-Wl,-z,pack-relative-relocs")],
)
def test_functions_and_labels_that_data_names_are_found(tmp_path: Path, flags: tuple[str, ...]) -> None:
    elf, symbols = built(tmp_path, "x.c", SOURCE, "-O1", *flags)
    found = code_pointers(elf)
    assert {symbols[name] for name in ("first", "second", "label_one", "label_two")} <= found
    assert all(elf.code_range(address) is not None for address in found)
    assert symbols["main"] not in found or "-static" in flags


def test_relocations_say_what_is_written_where(tmp_path: Path) -> None:
    elf, symbols = built(tmp_path, "x.c", SOURCE, "-O1", "-pie", "-fPIE")
    words = dict(written_words(elf))
    assert words[symbols["table"]] == symbols["first"]
    assert words[symbols["changed"]] == symbols["second"]


@pytest.mark.parametrize("flags", [("-shared",), ("-no-pie", "-nostartfiles", "-Wl,-e,inc")])
def test_restartable_sequences(tmp_path: Path, flags: tuple[str, ...]) -> None:
    elf, symbols = built(tmp_path, "x.s", SEQUENCE, *flags)
    assert restartable_sections(elf) == [(symbols["begin"], symbols["finish"], symbols["abort"])]


def test_a_file_without_restartable_sequences_has_none(tmp_path: Path) -> None:
    assert restartable_sections(built(tmp_path, "x.c", SOURCE)[0]) == []
