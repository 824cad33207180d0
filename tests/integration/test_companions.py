"""Programs in DProbes C for several modules: one run, whose variables, tables and records are common to all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from integration.support import TIMEOUT

ENGINES = ["ptrace", pytest.param("ebpf", marks=pytest.mark.skipif(os.geteuid() != 0, reason="ebpf needs root"))]
TARGET = """
import ctypes
libc, zlib = ctypes.CDLL(None), ctypes.CDLL("libz.so.1")
for number in range(5):
    libc.abs(number - 2)
    zlib.zlibVersion()
"""
PROGRAM = """
static long calls; global long sum; thread long mine; percpu long here;
libc.so.6:abs(int x) {
    calls++; sum += x; mine++; here += 1;
    @calls[comm] = count(); @sum = sum(x);
    printf("abs %d", x);
}
libz.so.1:zlibVersion {
    @calls[comm] = count(); mine++;
    printf("calls=%d sum=%d mine=%d seen=%d", calls, sum, mine, @sum);
}
"""


def dprobes(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "dprobes", *arguments], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == status, done.stderr
    return done


@pytest.mark.parametrize("engine", ENGINES)
def test_modules_share_variables_and_tables(engine: str, tmp_path: Path) -> None:
    program = tmp_path / "both.dpc"
    program.write_text(PROGRAM)
    done = dprobes("run", str(program), "--engine", engine, "--", sys.executable, "-S", "-c", TARGET)
    lines = [line.split("]  ")[-1] for line in done.stdout.splitlines()]
    expected, total = [], 0
    for number in range(5):
        total += number - 2
        expected.append(f"abs {number - 2}")
        expected.append(f"calls={number + 1} sum={total} mine={2 * (number + 1)} seen={total}")
    # In the order in which they happened, though two sessions have given them out.
    assert lines[:10] == expected
    assert sorted(lines[10:]) == [f"@calls[{Path(sys.executable).name}]: 10", "@sum: 0"]
    # One summary, with what happened in each module.
    summary = done.stderr.splitlines()
    assert sum("probe " in line and "place" in line for line in summary) == 1
    hits = {line.split()[1]: line.split()[4] for line in summary if line.startswith("0,")}
    assert hits == {"abs": "5", "zlibVersion": "5"}


@pytest.mark.parametrize("engine", ENGINES)
def test_records_of_a_short_command_are_in_order(engine: str, tmp_path: Path) -> None:
    (tmp_path / "short.c").write_text(
        "#include <stdio.h>\nint main(void) { for (int n = 0; n < 5; n++) fflush(stdout); return 0; }\n"
    )
    program = tmp_path / "short"
    subprocess.run(["gcc", "-O1", tmp_path / "short.c", "-o", program], check=True)
    text = f'"{program}":main {{ printf("main") }} libc.so.6:fflush {{ printf("flush") }}'
    for _ in range(5):  # the one session is at its end before the other one, whichever that is
        done = dprobes("run", "--engine", engine, "-e", text, "--", str(program))
        assert [line.split("]  ")[-1] for line in done.stdout.splitlines()] == ["main", *["flush"] * 5]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_exit_status_is_that_of_the_command(engine: str) -> None:
    text = "libc.so.6:abs { } libz.so.1:zlibVersion { }"
    for command, status in (("import sys; sys.exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)):
        words = ("--", sys.executable, "-S", "-c", command)
        dprobes("run", "-e", text, "--engine", engine, "--exit-status", *words, status=status)


GROUPS = """
[group "numbers"] libc.so.6:abs(int x) { printf("abs %d", x) }
[group "versions", type "rare"] libz.so.1:zlibVersion { printf("version") }
"""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_groups_choose_among_the_probes_of_all_modules(engine: str, is_compiled: bool, tmp_path: Path) -> None:
    chosen = ["-e", GROUPS]
    if is_compiled:
        (tmp_path / "p.dpc").write_text(GROUPS)
        dprobes("build", str(tmp_path / "p.dpc"), "-o", str(tmp_path / "p.ppdf"))
        chosen = [str(tmp_path / "p.ppdf")]
    expected = {
        ("--group", "numbers"): {f"abs {number - 2}" for number in range(5)},
        ("--group", "versions"): {"version"},
        ("--type", "RARE"): {"version"},
    }
    for words, lines in expected.items():
        done = dprobes("run", "--engine", engine, *words, *chosen, "--", sys.executable, "-S", "-c", TARGET)
        assert {line.split("]  ")[-1] for line in done.stdout.splitlines()} == lines


def test_a_group_that_nobody_has_is_an_error() -> None:
    done = dprobes("run", "--group", "number", "-e", GROUPS.strip(), "--", "true", status=2)
    assert done.stderr == (
        "-e:1:2: error: the program has no group 'number'\n"
        '    [group "numbers"] libc.so.6:abs(int x) { printf("abs %d", x) }\n'
        "     ^~~~~~~~~~~~~~~\n"
        "hint: did you mean 'numbers'?\n"
    )
    done = dprobes("run", "--type", "rare", "-e", "libc.so.6:abs { }", "--", "true", status=2)
    assert done.stderr == (
        "-e:1:1: error: the program has no type 'rare'\n"
        "    libc.so.6:abs { }\n"
        "    ^~~~~~~~~~~~~\n"
        "hint: no probe has a 'type'\n"
    )


@pytest.mark.alone
@pytest.mark.skipif(os.geteuid() != 0, reason="tracepoints need root")
def test_system_calls_and_functions_are_one_program() -> None:
    text = """
    static long opened;
    libc.so.6:abs(int x) { printf("opened=%d", opened) }
    syscall openat when (startswith(str(filename), "/dev/full")) { opened++; }
    """
    command = 'import ctypes, os; f = ctypes.CDLL(None); os.open("/dev/full", 0); os.open("/dev/full", 0); f.abs(1)'
    done = dprobes("run", "-e", text, "--format", "json", "--", sys.executable, "-S", "-c", command)
    # Names that are not in memory yet cannot be read: those hits end without a record.
    assert [json.loads(line)["fields"] for line in done.stdout.splitlines()] == [{"opened": 2}]


IN_KERNEL = "tracepoint sched:sched_process_exit { @[kstack(), curtask->tgid == pid] = count(); }"
IN_LIBRARY = "libc.so.6:abs { @calls = count(); }"


@pytest.mark.alone
@pytest.mark.skipif(os.geteuid() != 0, reason="tracepoints need root")
@pytest.mark.parametrize("text", [f"{IN_KERNEL} {IN_LIBRARY}", f"{IN_LIBRARY} {IN_KERNEL}"])
@pytest.mark.parametrize("way", [[], ["--engine", "ebpf"]])
def test_what_only_the_kernel_has_is_for_the_part_that_is_in_it(text: str, way: list[str]) -> None:
    done = dprobes("run", *way, "-e", text, "--", sys.executable, "-S", "-c", TARGET)
    assert "@calls: 5" in done.stdout
    assert re.search(r"^ +do_exit\+0x[0-9a-f]+ \[vmlinux\]$", done.stdout, re.MULTILINE)
    assert re.search(r"^, 1\]: 1$", done.stdout, re.MULTILINE), done.stdout


def test_a_part_in_a_library_has_nothing_of_the_kernel() -> None:
    text = f"{IN_KERNEL}\nlibc.so.6:abs {{ @[curtask->pid] = count(); }}"
    done = dprobes("build", "-o", "/dev/null", "-e", text, status=2)
    assert "-e:2:19: error: '->' needs a pointer to a structure, not 'unsigned long'\n" in done.stderr
    text = f"{IN_KERNEL}\nlibc.so.6:abs {{ @[kstack(), 1] = count(); }}"
    done = dprobes("build", "-o", "/dev/null", "-e", text, status=2)
    assert "error: the key 'kstack()' of table '@' needs a probe in the kernel\n" in done.stderr


def test_an_error_in_one_module_is_shown_before_anything_runs(tmp_path: Path) -> None:
    text = 'libc.so.6:abs { printf("x") } libz.so.1:no_such_function { printf("y") }'
    mark = tmp_path / "ran"
    done = dprobes("run", "-e", text, "--", "touch", str(mark), status=2)
    assert done.stderr.startswith("-e:1:31: error: ")
    assert "no_such_function" in done.stderr
    assert not mark.exists()


def test_one_engine_runs_all() -> None:
    # Nothing in the second program needs a tracer, but the first one does.
    text = 'libc.so.6:abs(int x) when (x == 99) { core() } libz.so.1:zlibVersion { printf("zlib") }'
    done = dprobes("run", "-e", text, "-v", "--", sys.executable, "-S", "-c", TARGET)
    assert "engine inline" in done.stderr
    assert len(done.stdout.splitlines()) == 5


def test_verbs_know_of_all_modules(tmp_path: Path) -> None:
    program = tmp_path / "both.dpc"
    program.write_text(PROGRAM)
    assert dprobes("check", str(program)).stderr == ""
    shown = dprobes("show", str(program)).stdout
    assert [line for line in shown.splitlines() if line.startswith("name = ")] == [
        'name = "libc.so.6"',
        'name = "libz.so.1"',
    ]
    emitted = dprobes("build", "--emit", "rpn", str(program)).stdout
    assert "// program 1 of 2\n" in emitted
    assert "\n// program 2 of 2\n" in emitted


def test_modules_have_words_of_one_size(tmp_path: Path) -> None:
    source, small = tmp_path / "small.c", tmp_path / "small32"
    source.write_text("void _start(void) { for (;;) ; }\n")
    subprocess.run(["gcc", "-m32", "-nostdlib", "-static", "-fno-pic", "-o", str(small), str(source)], check=True)
    done = dprobes("run", "-e", f'libc.so.6:abs {{ }} "{small}":_start {{ }}', "--", "true", status=2)
    assert f"error: '{small}' has words of 4 bytes" in done.stderr
    assert "note: 'libc.so.6' has words of 8 bytes" in done.stderr
