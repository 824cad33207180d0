"""Floating-point and vector registers are those that gdb shows, in all states; reading them changes none."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.support import TIMEOUT

if TYPE_CHECKING:
    from integration.support import Builder, Runner

EITHER = pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])
CONTROL = {"fcw": "fctrl", "fsw": "fstat", "ftw": "ftag", "fip": "fioff", "fcs": "fiseg", "fdp": "fooff",
           "fds": "foseg", "mxcsr": "mxcsr"}  # fmt: skip


def has_avx() -> bool:
    return " avx " in Path("/proc/cpuinfo").read_text()


def values_in_gdb(program: Path, place: str, expressions: dict[str, str]) -> dict[str, int]:
    if shutil.which("gdb") is None:
        pytest.skip("gdb is not installed")
    shown = [argument for e in expressions.values() for argument in ("-ex", f"echo {e}\\n", "-ex", e)]
    output = subprocess.run(
        ["gdb", "-nx", "-batch", "-ex", f"break *&{place}", "-ex", "run", *shown, str(program)],
        check=True,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    ).stdout
    values = {}
    for name, expression in expressions.items():
        answer = output.partition(f"\n{expression}\n")[2].partition("\n")[0]
        if name.startswith("ymm"):
            low, high = re.findall(r"0x[0-9a-f]+", answer)
            values[name] = int(low, 16) | int(high, 16) << 128
        else:
            values[name] = int(re.findall(r"0x[0-9a-f]+", answer)[-1], 16)
    return values


@pytest.mark.parametrize("place", ["at_first", "when_loaded"])
@EITHER
def test_they_are_what_gdb_shows(build: Builder, run: Runner, place: str, i386: bool) -> None:
    avx = has_avx()
    program = build("floats.S", "-no-pie", f"-DAVX={int(avx)}", i386=i386, name="floats")
    count = 8 if i386 else 16
    widths = {f"fr{n}": 80 for n in range(8)} | dict.fromkeys(CONTROL, 32) | {f"xmm{n}": 128 for n in range(count)}
    expressions = {f"fr{n}": f"info registers st{n}" for n in range(8)}
    expressions |= {name: f"p/x ${theirs}" for name, theirs in CONTROL.items()}
    expressions |= {f"xmm{n}": f"p/x $xmm{n}.uint128" for n in range(count)}
    if avx and not i386:
        widths |= {f"ymm{n}": 256 for n in range(count)}
        expressions |= {f"ymm{n}": f"p/x $ymm{n}.v2_int128" for n in range(count)}
    size = 4 if i386 else 8
    cells = {name: -(-bits // (8 * size)) for name, bits in widths.items()}
    pushes = "".join(f"push u, {name}\n" for name in reversed(widths))
    source = f"name = floats\noffset = {place}\nminor = 1\n{pushes}log {sum(cells.values())}\nexit\n"
    (words,) = run.command(source, program).words(size=size)
    found = {}
    for name, number in cells.items():
        found[name] = sum(words.pop(0) << 8 * size * n for n in range(number))
    assert found == values_in_gdb(program, place, expressions)
    if place == "when_loaded":
        first = b"".join((0x01000193 * n & 0xFFFFFFFF).to_bytes(4, "little") for n in range(1, 5))
        assert found["xmm0"] == int.from_bytes(first, "little")
        assert (found["fcw"], found["mxcsr"], found["fsw"] >> 11 & 7) == (0xE7F, 0x5FA0, 3)
        # st0 to st4 are -1, pi, zero, a denormal, and infinity; top is 3.
        assert found["ftw"] == 0b10_10_01_00_00_11_11_11
        assert found["fr0"] == 0xBFFF_8000_0000_0000_0000
    else:
        assert (found["fcw"], found["fsw"], found["ftw"], found["mxcsr"]) == (0x37F, 0, 0xFFFF, 0x1F80)


@EITHER
def test_cpuid_says_what_it_says_to_the_program(build: Builder, run: Runner, i386: bool) -> None:
    size = 4 if i386 else 8
    program = build("cpuid.c", i386=i386)
    leaves = (0, 1, 2, 7, 0x500, 0x40000000, 0x80000002, 0x80000008, 0x8FFFFFFF)
    pushes = "".join(f"push {leaf}\npush r, cpuid\n" for leaf in reversed(leaves))
    source = f"name = cpuid\noffset = main\nminor = 1\n{pushes}log {4 * len(leaves)}\nexit\n"
    result = run(source, ["--exit-status", "--", str(program), *map(str, leaves)])
    assert result.status == 0, result.stderr
    (words,) = result.words(size=size)
    printed = [[int(word, 16) for word in line.split()] for line in result.stdout.splitlines()]
    for number, leaf in enumerate(leaves):
        ours, theirs = words[4 * number : 4 * number + 4], printed[number]
        if leaf in (0x500, 0x8FFFFFFF):
            assert ours == [0, 0, 0, 0]  # beyond the last leaf, of which processors make different things
        elif leaf == 1:
            assert ours[0] == theirs[0]
            assert ours[1] & 0xFFFFFF == theirs[1] & 0xFFFFFF  # above: the number of the CPU
            assert ours[2:] == theirs[2:]
        elif leaf != 0x40000000 or any(ours):
            assert ours == theirs
