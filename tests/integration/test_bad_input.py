"""Bad places are refused by name, bad handlers end with an exception, and in either case the target goes on."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from integration.support import (
    TIMEOUT,
    await_line,
    await_true,
    code_is_original,
    read_result,
    running,
    symbols_of,
    tracer_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner

ENTRIES = 20
READS_NOWHERE = "push 7\nlog 1\npush 8\npush 0x10\nlog mrf\npush 0x10\npush mem, u32\npush 9\nlog 2\nexit\n"


def section_of(program: Path, name: str) -> tuple[int, int]:
    """Return offset and size in the file of a section, as readelf sees them."""
    text = subprocess.run(["readelf", "-SW", program], check=True, capture_output=True, text=True).stdout
    row = re.search(rf"\] {re.escape(name)} +\w+ +\w+ (\w+) (\w+)", text)
    assert row is not None
    return int(row[1], 16), int(row[2], 16)


def bad_offsets(program: Path) -> dict[str, tuple[str, str]]:
    """Return offsets that are no place of an instruction, each with what is said of it."""
    data = section_of(program, ".data")[0]
    beyond = program.stat().st_size + 0x1000
    tick = symbols_of(program)["tick"]
    return {
        "inside": ("tick + 1", f"offset {tick + 1:#x} is inside an instruction of '{program}'"),
        "data": (f"{data:#x}", f"offset {data:#x} is not in the code of '{program}'"),
        "variable": ("sum", f"'sum' in '{program}' is data, not code"),
        "header": ("0", f"offset 0x0 is not in the code of '{program}'"),
        "beyond": (f"{beyond:#x}", f"offset {beyond:#x} is not in the code of '{program}'"),
        "huge": ("0xffffffffffffffff", f"offset 0xffffffffffffffff is not in the code of '{program}'"),
        "nowhere": ("no_such_function", f"'{program}' has no symbol 'no_such_function'"),
    }


@pytest.mark.parametrize("kind", ["inside", "data", "variable", "header", "beyond", "huge", "nowhere"])
def test_a_place_without_an_instruction_is_refused_before_the_process_is_touched(
    build: Builder, run: Runner, kind: str
) -> None:
    program = build("hotloop.c")
    offset, message = bad_offsets(program)[kind]
    with running(build("torture.c"), 60, 1) as target:
        await_line(target)
        source = f"name = {program}\noffset = tick\nexit\noffset = {offset}\nexit\n"
        result = run(source.replace(f"= {program}", f'= "{program}"'), ["-p", str(target.pid)])
        assert re.search(rf"rpn:4:\d+: error: {message}$", result.stderr, re.MULTILINE), result.stderr
        assert result.status == 2
        assert result.records == []
        assert tracer_of(target.pid) == 0
        assert target.poll() is None


def test_a_module_that_is_mapped_but_not_executable_has_no_probepoints(build: Builder, run: Runner) -> None:
    program = build("hotloop.c")
    code = "import mmap, sys; f = open(sys.argv[1]); print(sum(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)[:]))"
    target = ["-c", code, str(program)]
    result = run(f'name = "{program}"\noffset = tick\nexit\n', ["--", sys.executable, *target])
    assert result.stdout == f"{sum(program.read_bytes())}\n"
    assert result.stderr.endswith(
        f"dprobes: error: no probepoint was inserted: no process mapped '{program}' as code\n"
    )
    assert result.status == 1


@pytest.mark.parametrize("name", ["[vdso]", "linux-vdso.so.1", "linux-gate.so.1", "[vsyscall]"])
def test_the_code_that_the_kernel_provides_is_refused(build: Builder, run: Runner, name: str) -> None:
    result = run(f'name = "{name}"\noffset = 0x100\nexit\n', ["--", str(build("hotloop.c")), "1"])
    assert (
        f"rpn:1:1: error: '{name}' cannot be probed: the kernel provides it, and no file contains its code\n"
        in result.stderr
    )
    assert "hint: probe the function that calls it, such as clock_gettime of 'libc.so.6'\n" in result.stderr
    assert result.status == 2
    assert result.stdout == ""


@pytest.mark.parametrize("distance", ["", " + 7"], ids=["its start", "its system call"])
@pytest.mark.parametrize("module", ["program", "libc"])
def test_the_signal_trampoline_can_be_probed(build: Builder, run: Runner, module: str, distance: str) -> None:
    program = build("signals.c", *(["-static"] if module == "program" else []))
    name = "signals" if module == "program" else '"libc.so.6"'
    source = f"name = {name}\noffset = __restore_rt{distance}\nminor = 1\npush r, eip\nlog 1\nexit\n"
    result = run(source, ["--exit-status", "--", str(program), "300"])
    if "has no symbol '__restore_rt'" in result.stderr:
        pytest.skip("the symbols of libc are not installed (package libc6-dbg)")
    assert result.status == 0, result.stderr
    alarms, values = (int(n) for n in result.stdout.split())
    assert values == 300
    # Each handler that returned came through here once: those of the alarms and those of the values.
    assert result.counts[1].hits == len(result.records) >= alarms + values
    assert len({words[0] for words in result.words()}) == 1


@pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])
def test_a_handler_that_reads_unmapped_memory_ends_there(build: Builder, run: Runner, i386: bool) -> None:
    program = build("hotloop.c", i386=i386)
    plain = subprocess.run([program, str(ENTRIES)], check=True, capture_output=True, text=True, timeout=TIMEOUT).stdout
    source = f"name = hotloop\nlogmax = 64\noffset = tick\nminor = 1\n{READS_NOWHERE}"
    result = run.command(source, program, ENTRIES)
    word = 4 if i386 else 8
    fault = b"\xff" + bytes([word, 0]) + (0x10).to_bytes(word, "little")
    assert {bytes.fromhex(r["data"]) for r in result.records} == {(7).to_bytes(word, "little") + fault}
    assert result.counts[1].hits == len(result.records) == ENTRIES
    assert result.stdout == plain


@pytest.mark.parametrize("header", ["", "jmpmax = 1\n", "jmpmax = 65535\n"], ids=["default", "1", "65535"])
@pytest.mark.parametrize("loop", ["jmp again", "push 1\njnz again"], ids=["jmp", "jnz"])
def test_a_handler_that_never_ends_is_ended(build: Builder, run: Runner, header: str, loop: str) -> None:
    program = build("hotloop.c")
    plain = subprocess.run([program, "5"], check=True, capture_output=True, text=True, timeout=TIMEOUT).stdout
    source = f"name = hotloop\n{header}offset = tick\nminor = 1\npush r, arg0\nlog 1\nagain:\n{loop}\nlog 1\nexit\n"
    result = run.command(source, program, 5)
    assert [words[0] for words in result.words()] == list(range(5))
    assert result.counts[1].hits == 5
    assert result.stderr.count("warning: the handler of 0,1 was ended by JMP_MAX, which nothing catches\n") == 1
    assert result.stdout == plain


def test_a_bad_handler_harms_neither_the_process_nor_its_code(build: Builder, run: Runner) -> None:
    program = build("torture.c")
    source = (
        "name = torture\noffset = stepped\nminor = 1\nmaxhits = 200\nagain:\npush 0\npush mem, u8\njmp again\nexit\n"
    )
    with running(program, 60, 1) as target:
        await_line(target)
        process, output = run.start(source, ["-p", str(target.pid)])
        await_true(lambda: output.exists() and output.read_text().count("\n") >= 200, "200 records")
        process.terminate()
        result = read_result(process, output)
        assert result.counts[1].hits == 200
        assert code_is_original(target.pid, program)
        assert target.poll() is None
