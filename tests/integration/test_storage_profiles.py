"""``dprobes storage``: accesses to fields against the program's own counts, and the layout against gdb's."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from integration.support import DPROBES, TIMEOUT, await_true, code_is_original, environment, running, tracer_of

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder

FLAGS = ("-g", "-pthread")


def storage(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run ``dprobes storage``, and return its output."""
    return subprocess.run(
        [*DPROBES, "storage", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=environment(),
        check=False,
    )


def rows_of(program: Path, variable: str, rounds: int, *options: str) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of a storage profile in JSON, and what the program has printed."""
    done = storage(f"{program}:{variable}", *options, "--json", "--", program, rounds)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.parametrize(
    ("optimization", "engine", "rounds"), [("-O0", "inline", 3000), ("-O2", "inline", 3000), ("-O2", "ptrace", 30)]
)
def test_accesses_are_those_that_the_program_counts(
    build: Builder, optimization: str, engine: str, rounds: int
) -> None:
    rows, printed = rows_of(build("storage.c", *FLAGS, optimization), "watched", rounds, "--engine", engine)
    counted: dict[tuple[int, str], tuple[int, int]] = {}
    for line in re.findall(r"^\d+ [a-z]+ \d+ \d+$", printed, re.MULTILINE):
        offset, function, reads, writes = line.split()
        counted[int(offset), function] = int(reads), int(writes)
    assert len(counted) == 20
    found = {(row["offset"], row["function"]): (row["reads"], row["writes"]) for row in rows if "function" in row}
    assert counted == found
    for row in rows:
        if "cache_line" in row:
            own = [counts for (offset, _), counts in counted.items() if offset == row["offset"]]
            assert (row["reads"], row["writes"]) == (sum(r for r, _ in own), sum(w for _, w in own))


def test_accesses_of_threads_are_counted(build: Builder) -> None:
    rows, _ = rows_of(build("storage.c", *FLAGS, "-O0"), "shared", 5000)
    found = [(row["field"], row["reads"], row["writes"]) for row in rows if row.get("function") == "thread"]
    assert found == [("last", 10000, 10000)]


def test_neighbours_are_one_structure_per_element(build: Builder) -> None:
    rows, _ = rows_of(build("storage.c", *FLAGS, "-O0"), "neighbours", 100)
    (row,) = [row for row in rows if row.get("function") == "mark"]
    assert (row["field"], row["reads"], row["writes"]) == ("flag", 0, 200)


def test_the_layout_is_that_of_gdb(build: Builder) -> None:
    program = build("storage.c", *FLAGS)
    rows, _ = rows_of(program, "watched", 1)
    fields = {(row["offset"], row["size"], row["field"]) for row in rows if "cache_line" in row}
    done = subprocess.run(
        ["gdb", "-batch", "-ex", "ptype /o struct record", program],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=True,
    )
    # ``/*     16      |       2 */        volatile short low;``
    member = re.compile(r"/\* +(\d+) +\| +(\d+) \*/ +[\w ]+ (\w+)(?:\[\d+\])?;")
    theirs = {(int(offset), int(size), name) for offset, size, name in member.findall(done.stdout)}
    assert len(theirs) == 7  # the members of the union have no offsets there
    ours = {(offset, size, name.split(".")[-1].split("[")[0]) for offset, size, name in fields if name is not None}
    assert theirs == ours - {(48, 8, "real"), (48, 8, "bits")}
    holes = [int(size) for size in re.findall(r"XXX +(\d+)-byte (?:hole|padding)", done.stdout)]
    assert sorted(size for _, size, name in fields if name is None) == sorted(holes)


def test_the_map_shows_cache_lines_and_holes(build: Builder) -> None:
    program = build("storage.c", *FLAGS, "-O2")
    done = storage(f"{program}:watched", "--map", "--", program, 30)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    mine = lines[lines.index("cache line 0: bytes 0 to 63") :]
    assert mine[1] == f"{'':5}0     1  flag       {'r' * 8}{'W' * 3:<22} 90 reads, 30 writes"
    assert mine[2] == f"{'':5}1     7  (hole)     {'r' * 6:<30} 60 reads, 0 writes"
    assert "cache line 1: bytes 64 to 71" in mine
    assert mine[-1] == "72 bytes, 2 cache lines (2 accessed), 3 holes of 16 bytes"


def test_what_is_not_seen_is_said(build: Builder) -> None:
    program = build("storage.c", *FLAGS, "-O2")
    done = storage(f"{program}:watched", "--", program, 1)
    notes = [line for line in done.stderr.splitlines() if line.startswith("dprobes: note: ")]
    assert re.fullmatch(
        r"dprobes: note: \d+ instructions of '[\w.]+' were checked for accesses to the 72 bytes of 'watched'", notes[0]
    )
    assert re.fullmatch(
        r"dprobes: note: not checked in '[\w.]+': \d+ instructions whose operand is on the stack", notes[1]
    )
    assert notes[2] == (
        "dprobes: note: not seen: accesses by the kernel, by other modules, by code that is made at run time, and by "
        "push, pop, call and return"
    )


def test_an_unknown_variable_is_refused(build: Builder) -> None:
    program = build("storage.c", *FLAGS)
    absent = storage(f"{program}:absent", "--", program, 1)
    assert absent.returncode == 1
    assert absent.stderr.splitlines() == [
        f"dprobes: error: '{program.name}' has no variable 'absent' with a fixed address in its debug information",
        "hint: variables of functions and of threads have none; gdb's 'info variables' lists the others",
    ]


def test_a_module_without_debug_information_is_refused(build: Builder) -> None:
    program = build("storage.c", "-pthread", "-g0")
    done = storage(f"{program}:shared", "--", program, 1)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"dprobes: error: '{program}' has no debug information, which describes variables and their fields",
        "hint: compile it with -g, install its debug symbols, or give a file that has them with --sym",
    ]


def test_an_engine_that_cannot_check_accesses_says_so(build: Builder) -> None:
    program = build("storage.c", *FLAGS)
    done = storage(f"{program}:watched", "--engine", "ebpf", "--", program, 1)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "Error: the engine ebpf lacks checks of the memory that instructions access; use --engine ptrace or inline"
    )


def test_a_variable_of_the_kernel_is_refused_with_a_way(build: Builder) -> None:
    done = storage("vmlinux:jiffies_64", "--", build("storage.c", *FLAGS), 1)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "dprobes: error: storage cannot profile variables of the kernel",
        (
            "hint: watch up to four fields of 1 to 8 bytes: dprobes run -e 'watch rw (long)kernel:jiffies_64 "
            "{ @[kstack(1)]++; }'"
        ),
    ]


def test_accesses_of_a_running_process_are_counted(build: Builder) -> None:
    program = build("storage.c", *FLAGS, "-O2")
    with running(program, 2000, "wait", stdin=subprocess.PIPE) as target:
        client = subprocess.Popen(
            [*DPROBES, "storage", f"{program}:watched", "-p", str(target.pid), "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        await_true(lambda: not code_is_original(target.pid, program), "a jump")
        printed, _ = target.communicate("\n", timeout=TIMEOUT)
        rows, errors = client.communicate(timeout=TIMEOUT)
    assert client.returncode == 0, errors
    found = {(row["offset"], row["function"]): row for row in map(json.loads, rows.splitlines()) if "function" in row}
    assert "8 add 2000 2000" in printed.splitlines()
    assert (found[8, "add"]["reads"], found[8, "add"]["writes"]) == (2000, 2000)


def test_a_process_goes_on_if_the_tool_is_killed(build: Builder) -> None:
    program = build("storage.c", *FLAGS, "-O2")
    with running(program, 300_000, "wait", stdin=subprocess.PIPE) as target:
        client = subprocess.Popen(
            [*DPROBES, "storage", f"{program}:watched", "-p", str(target.pid)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment(),
        )
        await_true(lambda: not code_is_original(target.pid, program), "a jump")
        assert target.stdin is not None
        target.stdin.write("\n")
        target.stdin.flush()
        tracer = tracer_of(target.pid)
        client.kill()
        if tracer:
            with contextlib.suppress(ProcessLookupError):
                os.kill(tracer, signal.SIGKILL)
        client.wait(TIMEOUT)
        printed, _ = target.communicate(timeout=TIMEOUT)
        assert target.returncode == 0
        assert "8 add 300000 300000" in printed.splitlines()


def test_accesses_of_a_static_program_are_counted(build: Builder) -> None:
    # The frame description of glibc's "__restore_rt" begins one byte before the function.
    rows, _ = rows_of(build("storage.c", *FLAGS, "-O2", "-static"), "watched", 50)
    (row,) = [row for row in rows if row.get("function") == "add" and row["offset"] == 8]
    assert (row["reads"], row["writes"]) == (50, 50)


def test_places_inside_instructions_are_not_checked(build: Builder, tmp_path: Path) -> None:
    # The symbol of "cut" ends inside an instruction, whose last 8 bytes look like two accesses and four nops.
    source = tmp_path / "cut.c"
    source.write_text("""
        struct pair { long first, second; } pair;
        __asm__(".type cut, @function\\ncut: .cfi_startproc\\n.byte 0x48, 0xb8\\n.size cut, 2\\n"
                ".byte 0x8b, 7, 0x8b, 7, 0x90, 0x90, 0x90, 0x90\\nret\\n.cfi_endproc\\n");
        extern void cut(struct pair *);
        int main(void) {
            cut(&pair);
            pair.second++;
            return 0;
        }
    """)
    program = tmp_path / "cut"
    subprocess.run(["gcc", "-g", "-O1", source, "-o", program], check=True, timeout=TIMEOUT)
    done = storage(f"{program}:pair", "--json", "--", program)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["field"], row["reads"], row["writes"]) for row in rows if "cache_line" in row] == [
        ("first", 0, 0),
        ("second", 1, 1),
    ]
    assert {"module": str(program), "unseen": "instructions inside other instructions", "instructions": 2} in rows
