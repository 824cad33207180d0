"""The values of variables at random instructions of a program: what gdb says, and what a compiled program prints."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.dpc.modules.latenames import DescribedModule, LateNames
from dprobes.dpc.typedtree.scattered import NotKnownError, Scattered
from dprobes.dpc.types.ctype import Record
from dprobes.target.elf.file import ElfFile
from integration.support import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["FLAGS", "asked", "compare", "dprobes"]

FUNCTIONS = ["distance", "folded", "make", "sorted", "hashed", "many", "walked", "recursive", "main"]
PLACES = 100
"""Instructions of each program at which all variables are compared: some 450 values."""

BEHIND = "behind the last piece of its structure"
OUTSIDE = "outside of its block"
"""gdb takes a block of several ranges for one from the first to the last instruction."""

FLAGS = ("-no-pie", "-fno-pie", "-g")

GDB = """
import gdb, json, random

chance = random.Random({seed})
functions, count, output = {functions}, {count}, {output!r}
for setting in ("pagination off", "confirm off", "debuginfod enabled off"):
    gdb.execute("set " + setting)
gdb.execute("break main", to_string=True)
gdb.execute("run", to_string=True)
gdb.execute("delete")
start = gdb.selected_frame().pc()
architecture = gdb.selected_frame().architecture()
places = {{}}
for name in functions:
    symbol = gdb.lookup_global_symbol(name) or gdb.lookup_static_symbol(name)
    if symbol is None:
        continue
    first = int(symbol.value().address)
    block = gdb.block_for_pc(first)
    while block.function is None or str(block.function) != name:
        block = block.superblock
    for instruction in architecture.disassemble(block.start, block.end - 1):
        if name != "main" or instruction["addr"] > start:
            places[instruction["addr"]] = (name, first)
for address in chance.sample(sorted(places), min(count, len(places))):
    gdb.execute(f"tbreak *{{address:#x}}", to_string=True)

def number(value):
    type_ = value.type.strip_typedefs()
    if type_.code in (gdb.TYPE_CODE_INT, gdb.TYPE_CODE_ENUM, gdb.TYPE_CODE_BOOL, gdb.TYPE_CODE_CHAR):
        return int(value)
    return int(value) & (1 << 64) - 1 if type_.code == gdb.TYPE_CODE_PTR else None

def rows(symbol, frame):
    try:
        value = symbol.value(frame)
        if value.is_optimized_out:
            yield symbol.name, None
            return
        type_ = value.type.strip_typedefs()
        if type_.code not in (gdb.TYPE_CODE_STRUCT, gdb.TYPE_CODE_UNION):
            yield symbol.name, number(value)
            return
        for field in type_.fields():
            yield f"{{symbol.name}}.{{field.name}}", None if value[field].is_optimized_out else number(value[field])
    except gdb.error:
        yield symbol.name, None

found = []
while True:
    gdb.execute("continue", to_string=True)
    try:
        frame = gdb.newest_frame()
    except gdb.error:
        break
    pc = frame.pc()
    line = frame.find_sal().line
    block = frame.block()
    while frame.type() == gdb.INLINE_FRAME:
        frame = frame.older()
    seen = set()
    while block is not None and not block.is_global and not block.is_static:
        for symbol in block:
            if (symbol.is_argument or symbol.is_variable) and symbol.name not in seen:
                seen.add(symbol.name)
                if {is_plain} and not symbol.is_argument and line <= symbol.line:
                    continue  # nobody has written to it yet: it is what was on the stack
                found += [(pc, places[pc][1], name, value) for name, value in rows(symbol, frame)]
        if block.function is not None and str(block.function) == places[pc][0]:
            break
        block = block.superblock
with open(output, "w") as file:
    json.dump(found, file)
"""


def asked(program: Path, directory: Path, seed: int) -> list[tuple[int, int, str, int | None]]:
    """Return link address, start of the function, name, and value of each variable, as gdb has them."""
    if shutil.which("gdb") is None:
        pytest.skip("gdb is not installed")
    script, output = directory / "ask.py", directory / "answers.json"
    script.write_text(
        GDB.format(seed=seed, functions=FUNCTIONS, count=PLACES, output=str(output), is_plain="-O0" in program.name)
    )
    done = subprocess.run(
        ["gdb", "-q", "-batch", "-nx", "-x", str(script), str(program)],
        capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert output.exists(), done.stderr
    return [tuple(row) for row in json.loads(output.read_text())]


class Comparison:
    """What a program for all variables is made of, and why others are not in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.module = DescribedModule(ElfFile.open(path))
        self.reasons: Counter[str] = Counter()
        self.strange: list[tuple[Any, ...]] = []
        self.wanted: dict[int, list[tuple[str, int]]] = {}

    def add(self, address: int, start: int, name: str, value: int | None) -> None:
        """Take a variable of gdb's into the program, if it is known to us as well."""
        offset = self.module.elf.file_offset(address)
        assert offset is not None
        names = LateNames(self.module, hex(offset), at_return=False)
        if "O0" in self.path.name and address < self._prologue_end(start):
            self.reasons["before the variables are where gdb looks"] += 1
            return
        known = self._is_known(names, name)
        if known is None and value is None:
            self.reasons["nowhere"] += 1
        elif known is None and value is not None:
            self.wanted.setdefault(offset, []).append((name, value))
            return
        elif known is None:
            self.strange.append((hex(address), name, "gdb has no value"))
        elif value is not None:
            # What lies behind the last piece of a structure is 0 for gdb.
            is_behind = known == "optimized out" and value == 0
            self.reasons[BEHIND if is_behind else known] += 1

    def _prologue_end(self, start: int) -> int:
        names = LateNames(self.module, hex(self.module.elf.file_offset(start) or 0), at_return=False)
        function = names._names._function  # type: ignore[union-attr]
        return self.module.prologue_end(function, start)

    def _is_known(self, names: LateNames, name: str) -> str | None:
        """Return None if a variable has a value for us, else why not."""
        whole, _, member = name.partition(".")
        try:
            found = names.find(whole)
            if found is None:
                return OUTSIDE
            if member and isinstance(found.value, Scattered) and isinstance(found.type, Record):
                place = found.type.member(member)
                assert place is not None
                names.member_of(found.value, place)
        except NotKnownError as error:
            return error.reason
        return None

    def text(self) -> str:
        lines = [f'module "{self.path}";']
        for offset, rows in self.wanted.items():
            values = ", ".join(f"(long)({name})" for name, _ in rows)
            lines.append(f'{offset:#x} {{ printf("at {offset}{" %d" * len(rows)}", {values}); }}')
        return "\n".join(lines)


def _is_of_stack(value: int) -> bool:
    return value >> 40 == 0x7F


def compare(
    program: Path, answers: Iterable[tuple[int, int, str, int | None]], tmp_path: Path, least: int = 250
) -> None:
    """Compare the values of variables at instructions of a program with those of gdb, ``least`` as many."""
    comparison = Comparison(program)
    for address, start, name, value in answers:
        comparison.add(address, start, name, value)
    source = tmp_path / "all.dpc"
    source.write_text(comparison.text())
    # Without randomization of addresses, as gdb runs it.
    done = dprobes("run", str(source), "--engine", "ptrace", "--", "setarch", "-R", str(program))
    first: dict[int, list[str]] = {}
    for line in done.stdout.splitlines():
        if "  at " in line:
            place, *values = line.split("  at ")[1].split()
            first.setdefault(int(place), values)
    equal = elsewhere = 0
    different = []
    for offset, rows in comparison.wanted.items():
        for (name, expected), printed in zip(rows, first[offset], strict=True):
            if int(printed) & (1 << 64) - 1 == expected & (1 << 64) - 1:
                equal += 1
            elif _is_of_stack(int(printed)) and _is_of_stack(expected):
                elsewhere += 1  # the environment is larger
            else:
                different.append((hex(offset), name, expected, printed))
    assert different == []
    assert comparison.strange == []
    assert equal >= least, (equal, comparison.reasons)
    assert elsewhere < 20
    # gdb follows calls to their sites; statically that cannot be done.
    reasons = {"before the variables are where gdb looks", "nowhere", "known only at the entry of the function",
               "in a register that is not for integers", BEHIND, OUTSIDE}  # fmt: skip
    assert set(comparison.reasons) <= reasons


def dprobes(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "dprobes", *arguments], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == status, done.stderr
    return done
