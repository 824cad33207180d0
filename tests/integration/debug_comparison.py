"""The values of variables at random instructions of a program: what gdb says, and what a compiled program prints."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.dpc.modules.debug_names import ProbeNames
from dprobes.dpc.modules.late_names import DescribedModule, LateNames
from dprobes.dpc.typedtree.name_scope import NotKnownError, Scattered
from dprobes.dpc.types.c_types import Array, Record, size_of
from dprobes.dwarf.address_lists import listed_expressions
from dprobes.dwarf.dwarf_numbers import At
from dprobes.target.elf.elf_file import ElfFile
from integration.support import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["FLAGS", "Comparison", "asked", "compare", "dprobes"]

VARIABLES_C = "distance|folded|make|sorted|hashed|many|walked|recursive"
"""The functions of ``variables.c``."""

PLACES = 100
"""Instructions of each program at which all variables are compared: some 450 values."""

FLAGS = ("-no-pie", "-fno-pie", "-g")

BEFORE = "before the variables are where gdb looks"
NOWHERE = "nowhere"
BEHIND = "behind the last piece of its structure"
OUTSIDE = "outside of its block"
IN_PARTS = "an array that is not in memory"
FAILED = "gdb fails"
EMPTY = "an empty range"
GDB_FAILS = (
    "integral type expected in DWARF expression",
    "Incompatible types on DWARF stack",
    "Could not find type for operation",
    "neither true nor false",  # clang 14 takes the address of an argument on the stack for its value
)
REASONS = {
    BEFORE: "gdb 13 reads the frame of a parameter before there is one; it is compared with its value when there is",
    NOWHERE: "neither of us has a value",
    "known only at the entry of the function": "gdb goes to the caller's call site, which is not known before the hit",
    BEHIND: "gdb takes what lies behind the last piece of a structure for 0",
    OUTSIDE: "gdb takes a block of several ranges for one from the first to the last instruction",
    "not yet where the function keeps it": "what the prologue has overwritten already; gdb is asked when it is over",
    "computed with floating-point numbers, or wide ones": "nothing is computed with floating-point numbers at a hit",
    "known only in the caller": "gdb goes to the caller's call site",
    EMPTY: "gdb 13 takes a range without instructions for one that holds at its first one",
    FAILED: "gdb 13 cannot convert between some types of expressions",
    "in parts of bytes": "pieces of some bits are not put together",
    IN_PARTS: "elements of arrays are read in memory only",
}
"""Why a value that gdb prints is not compared."""

GDB = """
import gdb, json, random

order = json.load(open({order!r}))
chance = random.Random(order["seed"])
for setting in ("pagination off", "confirm off", "debuginfod enabled off",
                "exec-wrapper env -i GOMAXPROCS=1 GOGC=off GODEBUG=asyncpreemptoff=1"):
    gdb.execute("set " + setting)
architecture = gdb.selected_inferior().architecture()
functions = {{}}
for name, low, high, end in order["functions"]:
    for instruction in architecture.disassemble(low, high - 1):
        functions[instruction["addr"]] = (low, high, end)
places = chance.sample(sorted(functions), min(order["count"], len(functions)))
for address in places:
    gdb.execute(f"tbreak *{{address:#x}}", to_string=True)
waiting = set(places)

INTEGERS = (gdb.TYPE_CODE_INT, gdb.TYPE_CODE_ENUM, gdb.TYPE_CODE_BOOL, gdb.TYPE_CODE_CHAR)

def rows(name, value, depth=0):
    type_ = value.type.strip_typedefs()
    is_whole = type_.code in (gdb.TYPE_CODE_STRUCT, gdb.TYPE_CODE_UNION, gdb.TYPE_CODE_ARRAY)
    if not is_whole and value.is_optimized_out:  # of others a part may be
        yield name, None
    elif type_.code in INTEGERS:
        # Without negative names gdb takes an enumeration for unsigned, whatever its type is.
        base = type_.target() if type_.code == gdb.TYPE_CODE_ENUM and order["has_bases"] else None
        number = int(value if base is None else value.cast(base))
        is_truth = type_.code != gdb.TYPE_CODE_BOOL or number in (0, 1)
        yield name, number if is_truth else ["error", "neither true nor false"]
        text = str(value).rpartition("::")[2]
        if type_.code == gdb.TYPE_CODE_ENUM and text.isidentifier():
            yield name, text
    elif type_.code == gdb.TYPE_CODE_PTR:
        yield name, int(value) & (1 << 64) - 1
    elif type_.code in (gdb.TYPE_CODE_REF, gdb.TYPE_CODE_RVALUE_REF):
        yield name, int(value.referenced_value().address)
    elif type_.code in (gdb.TYPE_CODE_STRUCT, gdb.TYPE_CODE_UNION) and depth < 2:
        for field in type_.fields():
            if field.name and not field.is_base_class:
                yield from guarded(f"{{name}}.{{field.name}}", lambda: value[field], depth + 1)
    elif type_.code == gdb.TYPE_CODE_ARRAY and depth < 2:
        low, high = type_.range()
        for number in range(low, min(high, low + 3) + 1):
            yield from guarded(f"{{name}}[{{number}}]", lambda: value[number], depth + 1)

def guarded(name, question, depth=0):
    try:
        yield from rows(name, question(), depth)
    except gdb.error as error:
        yield name, ["error", str(error)]

def symbols_at(pc):
    block = gdb.block_for_pc(pc)
    seen = set()
    while block is not None and not block.is_global and not block.is_static:
        for symbol in block:
            if (symbol.is_argument or symbol.is_variable) and symbol.name not in seen:
                seen.add(symbol.name)
                yield symbol, symbol.name, False
        if block.function is not None and block.start == functions[pc][0]:
            break
        block = block.superblock
    if block is not None and not order["is_joined"]:
        for symbol in block.static_block:
            plain = symbol.name.rpartition("::")[2]
            if symbol.is_variable and plain.startswith(("g", "table")) and plain not in seen:
                yield symbol, plain, True

def physical_frame():
    frame = gdb.newest_frame()
    while frame.type() == gdb.INLINE_FRAME:
        frame = frame.older()
    return frame

found = []

def take(pc, frame, only_arguments=False, is_before=False):
    line = gdb.find_pc_line(pc).line
    for symbol, name, is_common in symbols_at(pc):
        if only_arguments != (is_before and symbol.is_argument):
            continue
        if order["is_slow"] and not symbol.is_argument and not is_common and line <= symbol.line:
            continue  # the program has not written it yet, so its value is left over on the stack
        found.extend((pc, *row) for row in guarded(name, lambda: symbol.value(frame)))

while waiting:
    gdb.execute("run" if not found and not gdb.selected_inferior().pid else "continue", to_string=True)
    if not gdb.selected_inferior().pid:
        break
    pc = gdb.newest_frame().pc()
    if pc not in waiting:
        break
    before = []
    while pc in functions and functions[pc][0] <= pc < functions[pc][2] and order["is_plain"]:
        # Of the beginning of a function gdb knows the parameters when it is over.
        if pc in waiting:
            waiting.discard(pc)
            before.append(pc)
            take(pc, physical_frame(), is_before=True)
        gdb.execute("stepi", to_string=True)
        pc = gdb.newest_frame().pc()
    for each in before:
        take(each, physical_frame(), only_arguments=True, is_before=True)
    if pc in waiting:
        waiting.discard(pc)
        take(pc, physical_frame())
with open(order["output"], "w") as file:
    json.dump(found, file)
"""

Row = tuple[int, str, "int | str | list[str] | None"]
"""Address and name; a number, the name of an enumerator, None for what is optimized out, or an error of gdb's."""


def functions_of(program: Path, pattern: str) -> list[tuple[str, int, int, int]]:
    """Return name, first and last address, and the end of the prologue, of the functions whose names match."""
    module = DescribedModule(ElfFile.open(program))
    listing = subprocess.run(["nm", "-S", program], capture_output=True, text=True, check=True).stdout
    found = []
    for low, size, kind, name in (line.split(None, 3) for line in listing.splitlines() if len(line.split()) == 4):
        if kind in "tT" and re.fullmatch(pattern, name):
            start = int(low, 16)
            names = LateNames(module, hex(module.elf.file_offset(start) or 0), at_return=False)._names
            if isinstance(names, ProbeNames) and names._entry == start:
                found.append((name, start, start + int(size, 16), names._prologue_end))
    return found


def asked(
    program: Path,
    directory: Path,
    seed: int,
    *,
    pattern: str = VARIABLES_C,
    count: int = PLACES,
    is_plain: bool = False,
    is_joined: bool = False,
    is_slow: bool = False,
) -> list[Row]:
    """
    Return link address, name, and value of each variable at random instructions, as gdb has them.

    ``is_plain`` is a program without optimization, as is one of Go that ``is_slow``. Of one that ``is_joined`` (LTO)
    gdb 13 takes the static variables of any source file for those of the function's: they are left out.
    """
    if shutil.which("gdb") is None:
        pytest.skip("gdb is not installed")
    script, order, output = (directory / name for name in ("ask.py", "order.json", "answers.json"))
    functions = functions_of(program, pattern)
    what = {"seed": seed, "functions": functions, "count": count, "is_plain": is_plain, "is_joined": is_joined}
    what["is_slow"] = is_plain or is_slow
    what["has_bases"] = program.with_suffix("").parent.joinpath("a.cc").exists()
    order.write_text(json.dumps({**what, "output": str(output)}))
    script.write_text(GDB.format(order=str(order)))
    output.unlink(missing_ok=True)
    done = subprocess.run(
        ["gdb", "-q", "-batch", "-nx", "-x", str(script), str(program)],
        capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert output.exists(), done.stderr
    return [tuple(row) for row in json.loads(output.read_text())]


class Comparison:
    """The variables that a program for all of them reads, and the reason for each that it leaves out."""

    def __init__(self, path: Path, *, is_plain: bool = False) -> None:
        self.path = path
        self.module = DescribedModule(ElfFile.open(path))
        self.is_plain = is_plain
        self.reasons: Counter[str] = Counter()
        self.strange: list[tuple[Any, ...]] = []
        self.wanted: dict[int, list[tuple[str, int | str]]] = {}
        self.both_unknown = 0

    def add(self, address: int, name: str, value: int | str | list[str] | None) -> None:
        """Take a variable of gdb's into the program, if it is known to us as well."""
        offset = self.module.elf.file_offset(address)
        assert offset is not None
        names = LateNames(self.module, hex(offset), at_return=False)
        whole = re.split(r"[.[]", name)[0]
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*|\[[0-9]+\])*", name) is None:
            return  # names of Go and Rust that are none of C
        if not self.is_plain and _is_before_it_is_kept(names, whole):
            self.reasons[BEFORE] += 1
            return
        known = self._is_known(names, name)
        if isinstance(value, list):
            self.reasons[FAILED if value[1] in GDB_FAILS else value[1]] += 1
        elif known is None and value is None:
            self.strange.append((hex(address), name, "gdb has no value"))
        elif known is None and value is not None:
            self.wanted.setdefault(offset, []).append((name, value))
        elif value is None:
            self.reasons[NOWHERE] += 1
        elif known is not None and known.startswith("optimized out") and _has_empty_range(names, whole, address):
            self.reasons[EMPTY] += 1
        elif known is not None:
            self.reasons[known] += 1
            if known not in REASONS:
                self.strange.append((hex(address), name, f"{known}; gdb: {value}"))

    def _is_known(self, names: LateNames, name: str) -> str | None:
        """Return None if a variable has a value for us, else why not."""
        whole, *path = re.split(r"\.|(?=\[)", name)
        try:
            found = names.find(whole)
            if found is None:
                return OUTSIDE
            value, type_ = found.value, found.type
            for each in path:
                if not isinstance(value, Scattered):
                    return None
                if each.startswith("[") or not isinstance(type_, Record):
                    return IN_PARTS
                member = type_.member(each)
                assert member is not None
                end = max((part.offset + part.size for part in value.parts), default=0)
                if member.offset + (size_of(member.type) or 0) > end:
                    return BEHIND
                value, type_ = names.member_of(value, member), member.type
            if isinstance(value, Scattered) and isinstance(type_, Array):
                return IN_PARTS
        except NotKnownError as error:
            return error.reason
        return None

    def text(self) -> str:
        lines = [f'module "{self.path}";']
        for offset, rows in self.wanted.items():
            values = ", ".join(f"(long)({name})" if isinstance(value, int) else name for name, value in rows)
            forms = " ".join("%d" if isinstance(value, int) else "%s" for _, value in rows)
            lines.append(f'[maxhits 1] {offset:#x} {{ printf("at {offset} {forms}", {values}); }}')
        return "\n".join(lines)


def _is_before_it_is_kept(names: LateNames, name: str) -> bool:
    """Return whether a parameter is described by its place in a frame that the function has not yet made."""
    found = names._names
    assert isinstance(found, ProbeNames)
    parameter = next((each for each in found._parameters if each.name == name), None)
    return parameter is not None and found._is_before_it_is_kept(parameter, found._location(parameter))


def _has_empty_range(names: LateNames, name: str, address: int) -> bool:
    """Return whether a list of locations has a range for a variable that begins and ends at an instruction."""
    found = names._names
    assert isinstance(found, ProbeNames)
    variables = [each for block in found._blocks() for each in block.children() if each.name == name]
    lists = [listed_expressions(each, At.LOCATION) or () for each in variables]
    return any(each.start == each.end == address for listed in lists for each in listed)


def _is_elsewhere(value: int) -> bool:
    """Return whether a number is an address on the stack, or on Go's heap, which may be another one in each run."""
    return value >> 40 == 0x7F or value >> 32 == 0xC0


def compare(program: Path, answers: Iterable[Row], tmp_path: Path, least: int = 250, *, is_plain: bool = False) -> int:
    """
    Compare the values of variables at instructions of a program with those of gdb, ``least`` as many.

    Return how many were compared, those included of which neither has a value.
    """
    comparison = Comparison(program, is_plain=is_plain)
    for row in answers:
        comparison.add(*row)
    source = tmp_path / "all.dpc"
    source.write_text(comparison.text())
    # Without randomization of addresses, and with the same environment, as gdb runs it.
    command = ["setarch", "-R", "env", "-i", "GOMAXPROCS=1", "GOGC=off", "GODEBUG=asyncpreemptoff=1", str(program)]
    done = dprobes("run", str(source), "--engine", "ptrace", "--", *command)
    first: dict[int, list[str]] = {}
    for line in done.stdout.splitlines():
        if "  at " in line:
            place, *values = line.split("  at ")[1].split()
            first.setdefault(int(place), values)
    equal = elsewhere = 0
    different = []
    for offset, rows in comparison.wanted.items():
        for (name, expected), printed in zip(rows, first[offset], strict=True):
            if isinstance(expected, str):
                is_equal = printed == expected
            else:
                is_equal = printed.lstrip("-").isdigit() and (int(printed) - expected) % (1 << 64) == 0
            if is_equal:
                equal += 1
            elif isinstance(expected, int) and _is_elsewhere(int(printed)) and _is_elsewhere(expected):
                elsewhere += 1  # the auxiliary vector is larger
            else:
                different.append((hex(offset), name, expected, printed))
    assert different == [], different
    assert comparison.strange == [], comparison.strange
    assert set(comparison.reasons) <= set(REASONS), comparison.reasons
    assert elsewhere < 60
    assert equal >= least, (equal, comparison.reasons)
    return equal + comparison.reasons[NOWHERE]


def dprobes(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "dprobes", *arguments], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == status, done.stderr
    return done
