"""Where exceptions are caught, against the labels that the compiler writes into these tables."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.unwind.frame_tables import landing_pads

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

SOURCE = """
struct Guard { int *place; ~Guard() { ++*place; } };
void may_throw(int);
int cleans(int *place) { Guard guard{place}; may_throw(1); may_throw(2); return 3; }
int catches(int n) {
    try { may_throw(n); } catch (int value) { return value; } catch (...) { may_throw(5); return 6; }
    return n;
}
int nested(int *place, int n) {
    try { Guard guard{place}; try { may_throw(n); } catch (long) { may_throw(7); } } catch (int) { return 8; }
    return 9;
}
int plain(int n) { return n + 1; }
void leaves() noexcept { may_throw(10); }
"""
TABLE = re.compile(r"^\.LLSDACSB\w+:\n(.*?)^\.LLSDACSE", re.MULTILINE | re.DOTALL)


def listed_pads(assembly: str) -> set[str]:
    """Return the labels in the third of each four numbers of the tables."""
    pads: set[str] = set()
    for table in TABLE.findall(assembly):
        numbers = re.findall(r"\.uleb128 (\S+)", table)
        pads.update(number.partition("-")[0] for number in numbers[2::4])
    return pads - {"0"}


def labels(library: Path) -> dict[str, int]:
    names = subprocess.run(["nm", library], check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in names.splitlines()]
    return {row[2]: int(row[0], 16) for row in rows if len(row) == 3}


@pytest.mark.parametrize(
    "flags", [("-O0",), ("-O2",), ("-O2", "-fcf-protection"), ("-Os", "-fno-pic", "-mcmodel=large")]
)
def test_landing_pads_are_those_that_the_compiler_lists(tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "x.cc").write_text(SOURCE)
    steps = [
        ["g++", "-S", "-fPIC", *flags, "-o", "x.s", "x.cc"],
        ["as", "--keep-locals", "-o", "x.o", "x.s"],
        ["gcc", "-shared", "-Wl,--discard-none", "-o", "x.so", "x.o"],
    ]
    for step in steps:
        subprocess.run(step, check=True, cwd=tmp_path)
    listed = listed_pads((tmp_path / "x.s").read_text())
    assert len(listed) >= 4
    addresses = labels(tmp_path / "x.so")
    assert landing_pads(ElfFile.open(tmp_path / "x.so")) == {addresses[label] for label in listed}


def test_a_table_that_is_cut_names_none(tmp_path: Path) -> None:
    (tmp_path / "x.cc").write_text(SOURCE)
    subprocess.run(["g++", "-O2", "-fPIC", "-shared", "-o", tmp_path / "x.so", tmp_path / "x.cc"], check=True)
    elf = ElfFile.open(tmp_path / "x.so")
    whole = landing_pads(elf)
    section = next(section for section in elf.sections if section.name == ".gcc_except_table")
    data = bytearray(elf.data[:])
    data[section.offset : section.offset + section.size] = b"\x80" * section.size  # numbers without end
    assert whole
    assert landing_pads(ElfFile.of_bytes(elf.path, bytes(data))) == set()


def test_a_file_without_exceptions_has_none(tmp_path: Path) -> None:
    (tmp_path / "y.c").write_text("int value(int n) { return n + 1; }\n")
    subprocess.run(["gcc", "-fPIC", "-shared", "-o", tmp_path / "y.so", tmp_path / "y.c"], check=True)
    assert landing_pads(ElfFile.open(tmp_path / "y.so")) == set()
