"""The call stacks that handlers log are those of gdb and of libgcc, frame by frame, without frame pointers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.rpn.instruction_set import StackEnd, Token
from integration.support import TIMEOUT, await_true, read_result, symbols_of
from support.rounds import IS_TORTURE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from integration.support import Builder, Result, Runner

TESTS = Path(__file__).parents[1]
STOPS = 1500 if IS_TORTURE else 150

SCRIPT = """
set confirm off
set pagination off
set debuginfod enabled off
set backtrace past-main on
set backtrace past-entry on
set breakpoint pending on
handle all nostop noprint pass
tbreak {place}
ignore 1 {before}
run
python
import sys
sys.path[:0] = [{tests!r}, {source!r}]
from support.walk_comparison import compare
compare(1, {stops}, {word_size}, 40)
end
kill
"""


def differences(directory: Path, command: Sequence[object], place: str, before: int, word_size: int = 8) -> Any:
    """Compare stacks from the call of a function on; return how they ended, and those that differ."""
    if shutil.which("gdb") is None:
        pytest.skip("gdb is not installed")
    script = directory / "walk.gdb"
    source = str(TESTS.parent / "src")
    script.write_text(
        SCRIPT.format(place=place, before=before, stops=STOPS, word_size=word_size, tests=str(TESTS), source=source)
    )
    done = subprocess.run(
        ["gdb", "-nx", "-batch", "-x", str(script), "--args", *map(str, command)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=8 * TIMEOUT,
        check=False,
    )
    found = re.search(r"FOUND ({.*})$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout + done.stderr
    return json.loads(found[1])


@pytest.mark.parametrize(
    ("command", "place", "before"),
    [
        (("/usr/bin/openssl", "dgst", "-sha512", "/usr/bin/openssl"), "EVP_DigestUpdate", 3),
        (("/usr/bin/sqlite3", ":memory:", "create table t(a); insert into t values (1); select sum(a) from t"),
         "sqlite3_step", 0),
        (("/usr/bin/python3", "-c", "import json\nfor n in range(3000): json.dumps([n])"), "malloc", 200),
    ],
    ids=["libcrypto", "sqlite", "python"],
)  # fmt: skip
def test_stacks_at_random_instructions_of_real_programs_are_those_of_gdb(
    tmp_path: Path, command: Sequence[str], place: str, before: int
) -> None:
    if not Path(command[0]).exists():
        pytest.skip(f"{command[0]} is not installed")
    found = differences(tmp_path, command, place, before)
    assert found["differing"] == []
    assert found["ends"]["OUTERMOST"] >= 0.9 * STOPS


def test_stacks_of_exceptions_in_cpp_are_those_of_gdb(build: Builder, tmp_path: Path) -> None:
    program = build("throwing.cc", "-O2", "-lstdc++")
    found = differences(tmp_path, [program], "__cxa_throw", 0)
    assert found["differing"] == []
    assert found["ends"] == {"OUTERMOST": STOPS}


@pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])
def test_stacks_of_signal_handlers_are_those_of_gdb(build: Builder, tmp_path: Path, i386: bool) -> None:
    program = build("callstacks.c", "-O2", "-pthread", i386=i386)
    found = differences(tmp_path, [program], "handle", 0, 4 if i386 else 8)
    assert found["differing"] == []
    assert found["ends"]["OUTERMOST"] >= 0.7 * sum(found["ends"].values())


@pytest.mark.parametrize(
    "flags",
    [
        ("-static",),
        ("-fno-asynchronous-unwind-tables", "-fno-unwind-tables", "-g"),
        ("-fno-asynchronous-unwind-tables", "-fno-unwind-tables", "-g", "-gz=zlib"),
    ],
    ids=["static", "debug_frame", "compressed"],
)
def test_stacks_are_those_of_gdb_where_no_table_in_memory_can_be_found(
    build: Builder, tmp_path: Path, flags: Sequence[str]
) -> None:
    program = build("callstacks.c", "-O2", "-pthread", "-fomit-frame-pointer", *flags)
    found = differences(tmp_path, [program], "down", 900)
    assert found["differing"] == []
    assert found["ends"]["OUTERMOST"] >= 0.9 * sum(found["ends"].values())


def test_a_debug_file_has_tables_too(build: Builder, tmp_path: Path) -> None:
    program = tmp_path / "callstacks"
    shutil.copy(build("callstacks.c", "-O2", "-g", "-pthread", "-fno-asynchronous-unwind-tables"), program)
    debug = tmp_path / "callstacks.debug"
    subprocess.run(["objcopy", "--only-keep-debug", program, debug], check=True)
    subprocess.run(["objcopy", "--strip-all", f"--add-gnu-debuglink={debug}", program], check=True)
    found = differences(tmp_path, [program], "qsort", 0)
    assert found["differing"] == []
    assert found["ends"]["OUTERMOST"] >= 0.9 * sum(found["ends"].values())


def test_stacks_through_code_that_no_compiler_made_are_those_of_gdb(build: Builder, tmp_path: Path) -> None:
    program = build("handwritten.c", "-O2", "-Wl,-z,lazy", "-fomit-frame-pointer", "-fno-builtin", "-U_FORTIFY_SOURCE")
    found = differences(tmp_path, [program], "odd", 2)
    assert found["differing"] == []
    assert found["ends"] == {"OUTERMOST": STOPS}
    assert sum(count for depth, count in found["depths"].items() if int(depth) >= 5) > STOPS // 2


@pytest.mark.parametrize("language", ["rust", "go"])
def test_stacks_of_other_languages_are_those_of_gdb(
    tmp_path: Path, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing but the program itself is stepped through: Go collects no garbage, and interrupts nothing after a time.
    for name, value in {"GOMAXPROCS": "1", "GOGC": "off", "GODEBUG": "asyncpreemptoff=1"}.items():
        monkeypatch.setenv(name, value)
    program, sources = tmp_path / "program", TESTS / "programs"
    commands: dict[str, list[str | Path]] = {
        "rust": ["rustc", "-O", sources / "names.rs", "-o", program],
        "go": ["go", "build", "-o", program, sources / "stacks.go"],
    }
    command = commands[language]
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"{command[0]} is not installed")
    environment = {**os.environ, "GO111MODULE": "off"}
    subprocess.run(command, check=True, capture_output=True, timeout=8 * TIMEOUT, env=environment)
    found = differences(tmp_path, [program], "main" if language == "rust" else "main.main", 0)
    assert found["differing"] == []
    # The scheduler of Go runs on stacks whose last return address is none.
    assert found["ends"].keys() <= ({"OUTERMOST"} if language == "rust" else {"OUTERMOST", "NO_TABLE"})
    assert sum(count for depth, count in found["depths"].items() if int(depth) >= 4) > 0.5 * STOPS


def words_of(record: dict[str, Any], size: int) -> list[int]:
    data = bytes.fromhex(record["data"])
    assert data[0] == Token.USER_STACK
    assert len(data) == 3 + size * int.from_bytes(data[1:3], "little")
    return [int.from_bytes(data[n : n + size], "little") for n in range(3, len(data), size)]


SOURCE = "name = callstacks\nlogmax = 2048\noffset = here\nminor = 1\nlog ustack\nexit\n"


def written_records(output: Path) -> list[dict[str, Any]]:
    """Return the records of a run that goes on, whose last line may not be whole."""
    text = output.read_text() if output.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def stacks_of_waiting_program(run: Runner, source: str, program: Path, engine: str) -> Result:
    """Run a program that ends when all of its records are there, the last one being another thread's."""
    client, output = run.start(source, ["--", str(program), "wait"], ["--engine", engine], stdin=subprocess.PIPE)

    def has_last() -> bool:
        return any(record["tid"] != record["pid"] for record in written_records(output))

    await_true(has_last, "all records")
    assert client.stdin is not None
    client.stdin.close()
    client.stdin = None
    return read_result(client, output)


ENGINES = ["ptrace", pytest.param("ebpf", marks=pytest.mark.skipif(os.geteuid() != 0, reason="not root"))]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_logged_stack_is_what_the_program_itself_finds(build: Builder, run: Runner, engine: str) -> None:
    program = build("callstacks.c", "-O2", "-pthread", "-fomit-frame-pointer")
    result = stacks_of_waiting_program(run, SOURCE, program, engine)
    said = [[int(number, 16) for number in line.split()[1:]] for line in result.stdout.splitlines()]
    stacks = [words_of(record, 8) for record in result.records]
    assert len(stacks) == len(said) > 65
    assert [stack[0] for stack in stacks] == [record["ip"] for record in result.records]
    cut = [number for number, stack in enumerate(stacks) if stack[-1] == StackEnd.UNREADABLE]
    # With ebpf only the stack that is used at the hit is copied: that of a signal handler with a stack of its own.
    assert len(cut) == (engine == "ebpf")
    for number in cut:
        said[number] = [*said[number][: len(stacks[number]) - 2], StackEnd.UNREADABLE]
    assert [stack[1:] for stack in stacks] == said


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stack_of_an_i386_program_has_a_frame_for_each_call(build: Builder, run: Runner, engine: str) -> None:
    program = build("callstacks.c", "-O1", "-pthread", "-fomit-frame-pointer", i386=True)
    result = stacks_of_waiting_program(run, SOURCE, program, engine)
    stacks = [words_of(record, 4) for record in result.records[:60]]
    # All of them: main calls down(n), which calls itself n times, and then here().
    assert [len(stack) - len(stacks[0]) for stack in stacks] == list(range(60))
    assert [len(set(stack)) - len(set(stacks[0])) for stack in stacks] == [0, *[1] * 59]


def test_as_many_frames_as_are_wanted_are_logged(build: Builder, run: Runner) -> None:
    program = build("callstacks.c", "-O2", "-pthread", "-fomit-frame-pointer")
    result = run.command("name = callstacks\noffset = here\nminor = 1\nlog ustack, 2\nlog ustack, 0\nexit\n", program)
    assert {len(record["data"]) // 2 for record in result.records} == {3 + 2 * 8 + 3}


def test_a_stack_that_cannot_be_followed_says_why(build: Builder, run: Runner) -> None:
    flags = ("-O2", "-g0", "-pthread", "-fomit-frame-pointer", "-fno-asynchronous-unwind-tables", "-fno-unwind-tables")
    result = run.command(
        "name = callstacks\noffset = here\nminor = 1\nlog ustack\nexit\n", build("callstacks.c", *flags)
    )
    assert {tuple(words_of(record, 8)) for record in result.records} == {
        (result.records[0]["ip"], StackEnd.NO_TABLE),
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
def test_the_stack_with_which_a_program_has_gone_to_sleep(build: Builder, run: Runner) -> None:
    program = build("callstacks.c", "-O2", "-pthread", "-fomit-frame-pointer")
    header = "name = vmlinux\nmodtype = tracepoint\nlogmax = 2048\n"
    source = header + "offset = sched:sched_switch\nminor = 1\nlog ustack\nexit\n"
    client, output = run.start(source, ["--", str(program), "wait"], ["--engine", "ebpf"], stdin=subprocess.PIPE)

    def stacks() -> list[list[int]]:
        found = (r for r in written_records(output) if r["name"] == "callstacks" and r["pid"] == r["tid"])
        return [words_of(record, 8) for record in found]

    # In _start the last instruction but one calls __libc_start_main (sysdeps/x86_64/start.S of the GNU C library).
    behind_call = (symbols_of(program)["_start"] + 0x21) % 4096

    def sleeps() -> bool:
        return any(stack and stack[-1] % 4096 == behind_call for stack in stacks())

    await_true(sleeps, "a stack down to _start")
    assert client.stdin is not None
    client.stdin.close()
    client.stdin = None
    assert read_result(client, output).status == 0
