"""Arguments of USDT probes: handlers get what the program prints, whatever the compiler has made of them."""

from __future__ import annotations

import re
import struct
import subprocess
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from integration.support import DPROBES, symbols_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from integration.support import Result, Runner

ARGUMENTS = """name = usdt
offset = usdt:demo:widths
minor = 1
{pushes}
push 16
push usdt, 8
log str
log 10
exit
offset = usdt:demo:many
minor = 2
push usdt, 2
push usdt, 1
log 2
exit
offset = usdt:demo:twelve
minor = 3
{twelve}
log 12
exit
offset = usdt:demo:number
minor = 4
push usdt, 2
push usdt, 1
log 2
exit
""".format(
    pushes="\n".join(f"push usdt, {n}" for n in range(10, 0, -1)),
    twelve="\n".join(f"push usdt, {n}" for n in range(12, 0, -1)),
)


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


BUILDS = {
    "O0": ("-O0",),
    "O2": ("-O2",),
    "plain": ("-O2", "-DPLAIN"),
    "fixed address": ("-O2", "-fno-pie", "-no-pie"),
}


@pytest.mark.parametrize("flags", BUILDS.values(), ids=BUILDS)
def test_arguments_are_what_the_program_prints(
    usdt: Callable[..., Path], run: Runner, engine: list[str], flags: tuple[str, ...]
) -> None:
    _compare(run(ARGUMENTS, ["--", str(usdt(*flags)), "9"], engine), 8)


@pytest.mark.parametrize("flags", BUILDS.values(), ids=BUILDS)
def test_handlers_in_the_process_get_them_as_well(
    usdt: Callable[..., Path], run: Runner, flags: tuple[str, ...]
) -> None:
    result = run(ARGUMENTS, ["--log", "TSC", "--", str(usdt(*flags)), "600"], ["--engine", "inline"])
    result.records.sort(key=lambda record: record["time"])
    _compare(result, 8, 600)
    assert sum("inline" in counts.executed for counts in result.counts.values()) >= 3


@pytest.mark.parametrize("flags", [("-O0",), ("-O2",)], ids=["O0", "O2"])
def test_arguments_of_i386_programs_are_what_they_print(
    usdt: Callable[..., Path], run: Runner, engine: list[str], flags: tuple[str, ...]
) -> None:
    _compare(run(ARGUMENTS, ["--", str(usdt(*flags, i386=True)), "9"], engine), 4)


def _compare(result: Result, word: int, rounds: int = 9) -> None:
    assert result.status == 0, result.stderr
    widths = re.findall(r"^widths (.*)$", result.stdout, re.MULTILINE)
    many = re.findall(r"^many (.*)$", result.stdout, re.MULTILINE)
    assert len(widths) == len(many) == rounds
    bits = 8 * word
    records = [bytes.fromhex(r["data"]) for r in result.records if r["minor"] == 1]
    assert len(records) == rounds
    for line, data in zip(widths, records, strict=True):
        *before, text, last, shared = line.split()
        length = int.from_bytes(data[1:3], "little")
        assert data[3 : 3 + length].decode() == text
        words = [signed(n, bits) for n in struct.unpack(f"<10{'Q' if word == 8 else 'I'}", data[3 + length :])]
        printed = [int(number) for number in before]
        assert words[:7] == [signed(n & (1 << bits) - 1, bits) for n in printed]
        assert words[8:] == [int(last), int(shared)]
    assert [[signed(n, bits) for n in pair] for pair in result.words(2, word)] == [
        [int(number) for number in line.split()] for line in many
    ]
    assert result.words(3, word) == [list(range(n, n + 12)) for n in range(rounds)]
    for n, (double, single) in enumerate(result.words(4, word)):
        # The bits of a floating-point number; of a double the lower word, where a word has 4 bytes.
        bytes_ = struct.pack("<d", n + 0.25)
        assert double == int.from_bytes(bytes_[:word], "little")
        assert single == int.from_bytes(struct.pack("<f", n + 0.25), "little")


SIGNED = """
usdt {program}:demo:many(a, b) when (b < 0) {{ @negative[b] = count(); }}
usdt {program}:demo:widths {{ @cells[arg8] = count(); printf("%d %u %x", arg8, arg8, arg8); }}
"""


def test_arguments_have_the_sign_that_the_note_says(
    usdt: Callable[..., Path], any_engine: list[str], tmp_path: Path
) -> None:
    program, source = usdt("-O2"), tmp_path / "usdt.dpc"
    source.write_text(SIGNED.format(program=program))
    output = tmp_path / "output"
    command = [*DPROBES, "run", str(source), *any_engine, "-o", str(output), "--", str(program), "9"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    tables = done.stdout + output.read_text()
    negative = Counter(line.split()[2] for line in done.stdout.splitlines() if re.match(r"many -?\d+ -\d+$", line))
    assert {(key, count) for key, count in re.findall(r"@negative\[(\S+)\]: (\d+)", tables)} == {
        (key, str(count)) for key, count in negative.items()
    }
    cells = [int(line.split()[9]) for line in done.stdout.splitlines() if line.startswith("widths ")]
    assert min(cells) < 0
    assert dict(re.findall(r"@cells\[(\S+)\]: (\d+)", tables)) == {
        str(key): str(count) for key, count in Counter(cells).items()
    }
    said = [line.split("]  ", 1)[1] for line in output.read_text().splitlines() if "]  " in line]
    low = [cell & 0xFFFFFFFF for cell in cells]
    assert sorted(said) == sorted(f"{cell} {bits} {bits:x}" for cell, bits in zip(cells, low, strict=True))


IN_C = """
usdt {program}:demo:widths(byte, letter, small, port, whole, natural, word, char *text, cell, shared) {{
    printf("widths %d %u %d %u %d %u %ld %s %d %ld",
           byte, letter, small, port, whole, natural, word, text, cell, shared);
    @texts[str(text)] = count();
}}
usdt {program}:demo:many {{ printf("many %d %d", arg0, arg1); }}
usdt {program}:demo:twelve(a, b, c, d, e, f, g, h, i, j, k, int l) {{ printf("twelve %d %d %d", a, l, arg11); }}
usdt {program}:demo:guarded(n) when (n > 0) {{ @guarded[func] = sum(n); }}
"""


def test_programs_in_c_print_what_the_program_does(
    usdt: Callable[..., Path], any_engine: list[str], tmp_path: Path
) -> None:
    program, source, output = usdt("-O2"), tmp_path / "usdt.dpc", tmp_path / "output"
    source.write_text(IN_C.format(program=program))
    command = [*DPROBES, "run", str(source), *any_engine, "-o", str(output), "--", str(program), "9"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = [line.split("]  ", 1)[1] for line in output.read_text().splitlines() if "]  " in line]
    for name in ("widths", "many"):
        printed = [line for line in done.stdout.splitlines() if line.startswith(f"{name} ")]
        assert sorted(line for line in said if line.startswith(f"{name} ")) == sorted(printed)
        assert len(printed) == 9
    assert sorted(line for line in said if "twelve" in line) == [f"twelve {n} {n + 11} {n + 11}" for n in range(9)]
    tables = output.read_text() + done.stdout
    assert "@texts[above]: 5\n" in tables
    assert "@texts[below]: 4\n" in tables
    # That the program comes by at all is due to the semaphore.
    assert "semaphore 1 passed 9\n" in done.stdout
    assert re.search(r"^@guarded\[guarded\+0x[0-9a-f]+ .*\]: 36$", tables, re.MULTILINE)


def test_sites_of_one_probe_are_counted_apart(usdt: Callable[..., Path], run: Runner, engine: list[str]) -> None:
    program = usdt("-O2")
    result = run('name = usdt\noffset = "usdt:d?mo:ma*"\nminor = 1\nexit\n', ["--", str(program), "9"], engine)
    rows = re.findall(r"^0,1 +usdt:demo:many at many\+(0x[0-9a-f]+) +3 +3 ", result.stderr, re.MULTILINE)
    notes = subprocess.run(["readelf", "-nW", str(program)], check=True, capture_output=True, text=True).stdout
    start = symbols_of(program)["many"]
    sites = re.findall(r"Name: many\n +Location: (0x[0-9a-f]+)", notes)
    assert sorted(int(row, 16) for row in rows) == sorted(int(site, 16) - start for site in sites)


def test_a_compiled_program_carries_the_symbols_of_arguments(
    usdt: Callable[..., Path], run: Runner, engine: list[str], tmp_path: Path
) -> None:
    program = usdt("-O2", "-fno-pie", "-no-pie")
    source, compiled, stripped = tmp_path / "many.rpn", tmp_path / "many.ppdf", tmp_path / "stripped" / "usdt"
    text = "name = usdt\noffset = usdt:demo:many\nminor = 2\npush usdt, 2\npush usdt, 1\nlog 2\nexit\n"
    source.write_text(text)
    subprocess.run([*DPROBES, "build", str(source), "-o", str(compiled), "--for", str(program)], check=True)
    stripped.parent.mkdir()
    subprocess.run(["strip", "-o", str(stripped), str(program)], check=True)
    # Without symbols the place at 'table' and 'shared' is left out, and says why.
    bare = run(text, ["--", str(stripped), "9"], engine)
    assert "its argument 2 ('-8@shared(%rip)') cannot be pushed: '" in bare.stderr
    assert "has no symbol 'shared'" in bare.stderr
    output = tmp_path / "records"
    command = [*DPROBES, "run", str(compiled), *engine, "--format", "json", "-o", str(output), "--", str(stripped), "9"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    logs = [bytes.fromhex(data) for data in re.findall(r'"data": ?"([0-9a-f]+)"', output.read_text())]
    printed = [[int(n) for n in line.split()] for line in re.findall(r"^many (.*)$", done.stdout, re.MULTILINE)]
    assert len(printed) == 9
    assert [list(struct.unpack("<2q", log)) for log in logs] == printed


def test_one_line_of_c_prints_what_the_program_prints(
    usdt: Callable[..., Path], engine: list[str], tmp_path: Path
) -> None:
    program, output = usdt("-O2"), tmp_path / "records"
    line = f'usdt "{program}":demo:many(a, b) {{ printf("many %d %d", a, b); }}'
    command = [*DPROBES, "run", *engine, "-o", str(output), "-e", line, "--", str(program), "9"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    printed = re.findall(r"^many -?\d+ -?\d+$", done.stdout, re.MULTILINE)
    assert len(printed) == 9
    assert re.findall(r"many -?\d+ -?\d+$", output.read_text(), re.MULTILINE) == printed
