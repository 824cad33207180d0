"""Lengths of instructions of other processors are those of objdump, and branches lead where it says."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import TargetError
from dprobes.target.code.foreign_instructions import FOREIGN_MACHINES, instruction_length, instruction_text
from dprobes.target.code.successors import successors

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
#include <stdlib.h>
int compare(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }
int main(int argc, char **argv) {
    int numbers[4] = {3, 1, 2, argc};
    qsort(numbers, 4, sizeof *numbers, compare);
    return numbers[0] + atoi(argv[0]);
}
"""
TRIPLETS = {"aarch64": "aarch64", "riscv64": "riscv64", "s390x": "s390x", "ppc64": "powerpc64", "ppc": "powerpc"}
# A branch of objdump: its mnemonic, operands, and the address where it leads with the name of the function there.
_BRANCH = re.compile(r"(?:^|[\s,])(?:0x)?([0-9a-f]+) <")


def listed(machine: str, directory: Path) -> list[tuple[int, bytes, str]]:
    """Return address, bytes and text of instructions of a linked program."""
    tool = f"{TRIPLETS[machine]}-linux-gnu"
    for name in (f"{tool}-gcc", f"{tool}-objdump"):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")
    (directory / "sort.c").write_text(SOURCE)
    subprocess.run([f"{tool}-gcc", "-O2", "-static", "-o", "sort", "sort.c"], cwd=directory, check=True)
    command = [f"{tool}-objdump", "-d", "-w", "-z", "-j", ".text", "sort"]
    text = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"^ *([0-9a-f]+):\t((?:[0-9a-f]{2,8} )+) *\t(.*)$", text, re.MULTILINE)
    swaps = machine in ("aarch64", "riscv64")  # these are shown as numbers, not as bytes
    found = []
    for address, raw, shown in rows:
        data = b"".join(bytes.fromhex(part)[:: -1 if swaps else 1] for part in raw.split())
        found.append((int(address, 16), data, shown.partition(" # ")[0].partition("//")[0]))
    return found


@pytest.mark.parametrize("machine", TRIPLETS)
def test_instructions_and_branches_are_those_of_objdump(machine: str, tmp_path: Path) -> None:
    rows = [row for row in listed(machine, tmp_path) if not row[2].startswith((".", "(", "unimp", "udf"))]
    assert len(rows) > 10_000
    branches = 0
    for address, raw, shown in rows:
        assert instruction_length(machine, raw + b"\0\0\0\0", address) == len(raw), shown
        mnemonic = shown.split()[0]
        target = _BRANCH.search(shown)
        is_address = mnemonic.startswith(
            ("adr", "larl", "lrl", "lgrl", "strl", "stgrl", "ldr", "auipc", "exrl", "prfm")
        )
        is_address |= (
            mnemonic.startswith(("lgf", "llgf", "lh", "lgh", "llh", "llgh", "c", "sth", "pfdrl"))
            and len(raw) == 6
            and raw[0] in (0xC4, 0xC6)
        )
        try:
            places = successors(machine, raw, address, lambda _: 0x1000, lambda _: 0x2000)
        except TargetError:
            assert not target
            continue
        if target and not is_address:
            branches += 1
            assert int(target[1], 16) in places, shown
            assert places <= {int(target[1], 16), address + len(raw)}
        elif not target and 0x1000 not in places and mnemonic not in ("b", "bl"):
            assert places == {address + len(raw)} or mnemonic.startswith(("j", "b")), shown
    assert branches > 1000


@pytest.mark.parametrize(
    ("machine", "raw", "places"),
    [
        ("aarch64", "c0035fd6", {0x700}),  # ret
        ("aarch64", "00013fd6", {0x700}),  # blr x8
        ("riscv64", "8280", {0x700}),  # ret
        ("riscv64", "e7800000", {0x700}),  # jalr ra, 0(ra)
        ("riscv64", "67808000", {0x708}),  # jr 8(ra)
        ("s390x", "07fe", {0x700, 0x1002}),  # br %r14
        ("s390x", "07f0", {0x1002}),  # nopr
        ("s390x", "0de1", {0x700, 0x1002}),  # basr %r14, %r1
        ("s390x", "4710b010", {0x710, 0x1004}),  # bc 1, 16(%r11)
        ("s390x", "e3201fffff46", {0x700 - 1, 0x1006}),  # bctg %r2, -1(%r1)
        ("ppc64", "4e800020", {0x700, 0x1004}),  # blr
        ("ppc", "4e800421", {0x700, 0x1004}),  # bctrl
        ("ppc", "48000103", {0x100}),  # bla 0x100
        ("x86_64", "c3", {0x900}),  # ret
        ("x86_64", "ffe0", {0x700}),  # jmp rax
        ("x86_64", "ff24c500800000", {0x900}),  # jmp [rax*8+0x8000]
        ("x86_64", "ff1510000000", {0x900}),  # call [rip+0x10]
        ("x86_64", "7410", {0x1002, 0x1012}),  # je
        ("i386", "e8fbffffff", {0x1000}),  # call
        ("i386", "cd80", {0x1002}),  # int 0x80
        ("i386", "90", {0x1001}),
    ],
)
def test_branches_through_registers_and_memory(machine: str, raw: str, places: set[int]) -> None:
    assert successors(machine, bytes.fromhex(raw), 0x1000, lambda _: 0x700, lambda _: 0x900) == places


@pytest.mark.parametrize(
    ("machine", "raw", "message"),
    [
        ("aarch64", "e0039fd6", "where the branch 0xd69f03e0 leads is not known"),  # eret
        ("riscv64", "73002030", "where the return 0x30200073 leads is not known"),  # mret
        ("s390x", "b2b20000", "where the branch b2b20000 leads is not known"),  # lpswe
        ("ppc64", "4c000024", "where the branch 0x4c000024 leads is not known"),  # rfid
        ("x86_64", "48cf", "where the branch 48cf leads is not known"),  # iretq
        ("m68k", "4e75", "the branches of m68k are not known"),
    ],
)
def test_what_cannot_be_followed(machine: str, raw: str, message: str) -> None:
    with pytest.raises(TargetError) as caught:
        successors(machine, bytes.fromhex(raw), 0x1000, lambda _: 0, lambda _: 0)
    assert caught.value.message == message


def test_lengths() -> None:
    assert [instruction_length("s390x", bytes([first, 0, 0, 0, 0, 0]), 0) for first in (0x07, 0x47, 0xA7, 0xC0)] == [
        2,
        4,
        4,
        6,
    ]
    assert instruction_length("s390", b"\xc0\0\0\0", 0) is None
    assert [instruction_length("riscv64", bytes([first, 0, 0, 0]), 2) for first in (0x01, 0x13)] == [2, 4]
    assert instruction_length("aarch64", b"\0\0\0\0", 2) is None
    assert instruction_length("ppc", b"\0\0", 0) is None
    assert "x86_64" not in FOREIGN_MACHINES


def test_text() -> None:
    assert instruction_text("aarch64", bytes.fromhex("c0035fd6"), 0) == ("ret", "ret")
    assert instruction_text("ppc64", bytes.fromhex("38630001"), 0) == ("addi", "addi r3, r3, 1")
    assert instruction_text("s390", bytes.fromhex("07fe"), 0) == ("br", "br %r14")
    assert instruction_text("riscv64", bytes.fromhex("8280"), 0)[0] in ("ret", "c.jr")
    assert instruction_text("ppc", bytes(4), 0) == (".insn", ".insn 0x00000000")
