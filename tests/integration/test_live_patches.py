"""``dprobes patch``: functions of running programs are replaced, and restored; no call is ever wrong."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import reduce
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ptrace.patching.live_patches import insert_patch, plan_patch, remove_patch
from dprobes.engines.ptrace.patching.patch_records import is_active, listed_patches, patches_of
from dprobes.engines.ptrace.tracer.thread_stopper import await_stop
from dprobes.errors import EngineError
from dprobes.platform.linux import ptrace_calls
from dprobes.target.elf.elf_file import ElfFile
from integration.documented_commands import ROOT
from integration.support import (
    DPROBES,
    PROGRAMS,
    TIMEOUT,
    await_line,
    code_is_original,
    environment,
    is_traced,
    running,
)
from support.rounds import rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from integration.support import Builder

OBJECT = ("-shared", "-fPIC", "-nostartfiles")
OTHER_PART = str(PROGRAMS / "named_twice.c")
FORMS = {
    "pie": ("-O1",),
    "fixed": ("-O1", "-no-pie"),
    "short": ("-O0",),
    "marked": ("-O0", "-fcf-protection"),
}
"""Flags for programs in which the first instructions of the function differ, and their addresses."""

CYCLES = """
import sys
from pathlib import Path
from dprobes.engines.ptrace.patching.live_patches import insert_patch, plan_patch, remove_patch
from dprobes.engines.ptrace.patching.patch_records import is_active, patches_of
pid = int(sys.argv[1])
for record in patches_of(pid):
    if is_active(pid, record):
        remove_patch(pid, record)
planned = plan_patch(pid, Path(sys.argv[2]), "work", None, None)
print("planned", flush=True)
while True:
    remove_patch(pid, insert_patch(planned).record)
"""


def program_of(build: Builder, form: str = "pie") -> Path:
    return build("replaced.c", *FORMS[form], OTHER_PART)


def patch(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*DPROBES, "patch", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment(), check=False)


def ask(process: subprocess.Popen[str], line: str = "") -> str:
    """Write a line to a program, and return the line that it prints."""
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return await_line(process).rstrip("\n")


def results_of(process: subprocess.Popen[str]) -> list[int]:
    """End the input of replaced.c; return its numbers of results: original, patched, wrong."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    found = [int(word) for word in process.stdout.readlines()[-1].split()]
    assert process.wait(TIMEOUT) == 0
    return found


@pytest.fixture
def replaced(build: Builder) -> Iterator[subprocess.Popen[str]]:
    with running(program_of(build), stdin=subprocess.PIPE) as process:
        assert await_line(process) == "ready\n"
        yield process


@pytest.mark.parametrize("form", FORMS)
def test_no_call_is_wrong_while_a_function_is_replaced_and_restored(form: str, build: Builder) -> None:
    program, replacing = program_of(build, form), build("replacing.c", *OBJECT)
    cycles = rounds(1000, 100 if form == "short" else 20)
    with running(program, stdin=subprocess.PIPE) as process:
        assert await_line(process) == "ready\n"
        planned = plan_patch(process.pid, replacing, "work", None, None)
        for _ in range(cycles):
            record = insert_patch(planned).record
            assert is_active(process.pid, record)
            assert remove_patch(process.pid, record)
            assert not is_active(process.pid, record)
        assert code_is_original(process.pid, program)
        assert len(patches_of(process.pid)) == cycles
        original, patched, wrong = results_of(process)
    assert wrong == 0
    assert original
    assert patched


def test_a_killed_dprobes_leaves_either_function(build: Builder, replaced: subprocess.Popen[str]) -> None:
    replacing = build("replacing.c", *OBJECT)
    moments = random.Random(34)
    for _ in range(rounds(300, 10)):
        tool = [sys.executable, "-c", CYCLES, str(replaced.pid), str(replacing)]
        with running(*tool, env=environment()) as cycling:
            assert await_line(cycling) == "planned\n"
            time.sleep(moments.random() / 5)
            cycling.send_signal(signal.SIGKILL)
            cycling.wait(TIMEOUT)
        assert not is_traced(replaced.pid)
        assert ask(replaced).split()[0] in ("1003", "1001003")
    if any(is_active(replaced.pid, record) for record in patches_of(replaced.pid)):
        assert patch("--remove", "-p", replaced.pid, "--allow-write").returncode == 0
    assert code_is_original(replaced.pid, program_of(build))
    assert results_of(replaced)[2] == 0


def test_the_end_of_a_run_restores_the_function(build: Builder, replaced: subprocess.Popen[str]) -> None:
    replacing = build("replacing.c", *OBJECT)
    command = [*DPROBES, "patch", f"{replacing}:work", "-p", replaced.pid, "--allow-write"]
    assert ask(replaced) == "1003 107 4"
    with running(*command, env=environment(), stderr=subprocess.PIPE) as tool:
        said = await_line(tool)
        assert re.fullmatch(
            rf"patched 'work' of '{program_of(build)}' in process {replaced.pid}: 9 threads stopped for [\d.]+ ms"
            r"(, at stop \d+)?; 28 KiB at 0x[0-9a-f]+\n",
            said,
        )
        assert not is_traced(replaced.pid)
        assert ask(replaced).split()[0] == "1001003"
        tool.send_signal(signal.SIGINT)
        output, errors = tool.communicate(timeout=TIMEOUT)
    assert output == (
        f"restored 'work' in process {replaced.pid}; 28 KiB of the patch stay mapped, as threads may be in it\n"
    )
    assert errors.endswith("Ctrl-C restores the function\n")
    assert tool.returncode == 0
    assert ask(replaced) == "1003 107 4"
    assert code_is_original(replaced.pid, program_of(build))


@pytest.mark.parametrize("form", FORMS)
def test_a_function_shorter_than_a_jump_is_replaced_and_restored(form: str, build: Builder) -> None:
    program, replacing = program_of(build, form), build("replacing.c", *OBJECT)
    with running(program, stdin=subprocess.PIPE) as process:
        assert await_line(process) == "ready\n"
        planned = plan_patch(process.pid, replacing, "padded", None, None)
        record = insert_patch(planned).record
        assert len(record.original) == len(record.jump) == 5
        assert [is_active(process.pid, each) for each in patches_of(process.pid)] == [True]
        assert remove_patch(process.pid, record)
        assert code_is_original(process.pid, program)
        with Path(f"/proc/{process.pid}/mem").open(
            "r+b", buffering=0
        ) as memory:  # padding that another tool has changed
            memory.seek(record.start + 4)
            memory.write(b"\xcc")
        with pytest.raises(EngineError, match="'padded' was not patched: memory differs from the file"):
            insert_patch(planned)


def test_a_run_whose_output_fails_restores_the_function(build: Builder, replaced: subprocess.Popen[str]) -> None:
    replacing = build("replacing.c", *OBJECT)
    command = [*DPROBES, "patch", f"{replacing}:work", "-p", str(replaced.pid), "--allow-write"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT, env=environment(), check=False
        )
    assert done.returncode == 1
    assert done.stderr.endswith("dprobes: error: standard output: no space left on device\n")
    assert [is_active(replaced.pid, each) for each in patches_of(replaced.pid)] == [False]
    assert ask(replaced).split()[0] == "1003"


def test_a_thread_is_no_process(build: Builder, replaced: subprocess.Popen[str]) -> None:
    thread = next(each.name for each in Path(f"/proc/{replaced.pid}/task").iterdir() if int(each.name) != replaced.pid)
    done = patch(f"{build('replacing.c', *OBJECT)}:work", "-p", thread, "--allow-write")
    assert done.returncode == 1
    assert f"dprobes: error: {thread} is not the id of a process: " in done.stderr
    assert not patches_of(replaced.pid)


@pytest.mark.parametrize("form", ["pie", "fixed"])
def test_a_process_that_executes_a_program_meanwhile_is_not_patched(form: str, build: Builder) -> None:
    replacing = build("replacing.c", *OBJECT)
    with running(program_of(build, form), stdin=subprocess.PIPE) as process:
        assert await_line(process) == "ready\n"
        planned = plan_patch(process.pid, replacing, "next_line", None, None)

        def execute(_: float) -> None:
            assert ask(process, "e") == "ready"

        with pytest.raises(EngineError) as caught:  # but for the exec, a frame of the function stays
            insert_patch(planned, idle=TIMEOUT, pause=execute)
        assert (
            caught.value.message == f"'next_line' was not patched: process {process.pid} executes another program now"
        )
        assert not patches_of(process.pid)
        assert ask(process).split()[0] == "1003"


def test_a_patch_calls_the_functions_of_preloaded_libraries(tmp_path: Path) -> None:
    (tmp_path / "main.c").write_text(
        "#include <stdio.h>\nint mark(void);\n__attribute__((noinline, noclone)) int shown(void)"
        '{ __asm__ volatile("nop; nop; nop; nop; nop"); return 0; }\n'
        'int main(void) { char line[9]; do { printf("%d %d\\n", mark(), shown()); fflush(stdout); }'
        " while (fgets(line, sizeof line, stdin)); }\n"
    )
    (tmp_path / "fix.c").write_text("int mark(void);\nint shown(void) { return 10 + mark(); }\n")
    for number, name in enumerate(("preloaded", "linked"), 1):
        (tmp_path / f"{name}.c").write_text(f"int mark(void) {{ return {number}; }}\n")
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", f"lib{name}.so", f"{name}.c"], cwd=tmp_path, check=True)
    subprocess.run(["gcc", "-O1", "main.c", "./liblinked.so", "-o", "main"], cwd=tmp_path, check=True)
    subprocess.run(["gcc", *OBJECT, "-O1", "fix.c", "-o", "fix.so"], cwd=tmp_path, check=True)
    preloading = os.environ | {"LD_PRELOAD": str(tmp_path / "libpreloaded.so")}
    with running(tmp_path / "main", cwd=tmp_path, env=preloading, stdin=subprocess.PIPE) as process:
        assert await_line(process) == "1 0\n"
        insert_patch(plan_patch(process.pid, tmp_path / "fix.so", "shown", None, None))
        assert ask(process) == "1 11"


def test_the_run_ends_with_the_process(build: Builder, replaced: subprocess.Popen[str]) -> None:
    replacing = build("replacing.c", *OBJECT)
    command = [*DPROBES, "patch", f"{replacing}:work", "-p", replaced.pid, "--allow-write"]
    with running(*command, env=environment(), stderr=subprocess.PIPE) as tool:
        await_line(tool)
        results_of(replaced)
        _, errors = tool.communicate(timeout=TIMEOUT)
    assert errors.endswith(f"process {replaced.pid} has ended\n")
    assert tool.returncode == 0


def test_a_persistent_patch_is_listed_and_removed(build: Builder, replaced: subprocess.Popen[str]) -> None:
    replacing = build("replacing.c", *OBJECT)
    done = patch(f"{replacing}:work", "-p", replaced.pid, "--allow-write", "--persist")
    assert done.returncode == 0
    assert ask(replaced).split()[0] == "1001003"
    rows = [line.split() for line in patch("--list", "-p", replaced.pid).stdout.splitlines()]
    assert rows == [
        ["FUNCTION", "MODULE", "STATE", "PATCH", "KIB"],
        ["work", program_of(build).name, "active", f"{replacing}:work", "28"],
    ]
    assert patch("--remove", "-p", replaced.pid, "--allow-write", "work").returncode == 0
    assert patch("--list", "-p", replaced.pid).stdout.splitlines()[1].split()[2] == "removed"
    missing = patch("--remove", "-p", replaced.pid, "--allow-write", "work")
    assert missing.stderr == (
        f"dprobes: error: process {replaced.pid} has no patch of 'work'\n"
        f"hint: dprobes patch --list -p {replaced.pid} lists them\n"
    )
    assert ask(replaced).split()[0] == "1003"
    assert results_of(replaced)[2] == 0


def first_of(process: subprocess.Popen[str]) -> int:
    """Return the program's work(1): 1003 without a patch."""
    return int(ask(process).split()[0])


def states_of(pid: int) -> list[tuple[str, str]]:
    return [(record.symbol, state.value) for record, state in listed_patches(pid)]


@pytest.mark.parametrize("order", list(permutations(("work", "doubled", "increased"))), ids="-".join)
def test_stacked_patches_are_removed_in_any_order(
    order: tuple[str, ...], build: Builder, replaced: subprocess.Popen[str]
) -> None:
    """Each patch calls the former one; the results show which are left, and in which order."""
    effects: dict[str, Callable[[int], int]] = {
        "work": lambda n: n + 1_000_000, "doubled": lambda n: 2 * n, "increased": lambda n: n + 10,
    }  # fmt: skip
    replacing, present = build("replacing.c", *OBJECT), dict[str, "Callable[[int], int]"]()
    for symbol, effect in effects.items():
        present[symbol] = effect
        insert_patch(plan_patch(replaced.pid, replacing, symbol, "work", None))
        assert first_of(replaced) == reduce(lambda n, apply: apply(n), present.values(), 1003)
    assert first_of(replaced) == 2 * 1_001_003 + 10
    assert states_of(replaced.pid) == [("work", "stacked"), ("doubled", "stacked"), ("increased", "active")]
    for symbol in order:
        done = patch("--remove", f"{replacing}:{symbol}", "-p", replaced.pid, "--allow-write")
        assert (done.returncode, done.stderr) == (0, "")
        del present[symbol]
        assert first_of(replaced) == reduce(lambda n, apply: apply(n), present.values(), 1003)
        assert [symbol for symbol, state in states_of(replaced.pid) if state != "removed"] == list(present)
    assert code_is_original(replaced.pid, program_of(build))


def test_a_replacing_patch_calls_the_original(build: Builder, replaced: subprocess.Popen[str]) -> None:
    replacing = build("replacing.c", *OBJECT)
    done = []
    for symbol, *more in (("work",), ("doubled", "--replace"), ("increased",)):
        where = (f"{replacing}:{symbol}=work", "-p", replaced.pid, "--allow-write", "--persist", *more)
        done.append(patch(*where).returncode)
    assert done == [0, 0, 0]
    assert first_of(replaced) == 2 * 1003 + 10
    rows = [line.split()[2:4] for line in patch("--list", "-p", replaced.pid).stdout.splitlines()[1:]]
    names = [f"{replacing}:{symbol}" for symbol in ("work", "doubled", "increased")]
    assert rows == [["replaced", names[0]], ["stacked", names[1]], ["active", names[2]]]
    assert patch("--remove", f"{replacing}:doubled", "-p", replaced.pid, "--allow-write").returncode == 0
    assert first_of(replaced) == 1_001_003 + 10
    assert patch("--remove", "work", "-p", replaced.pid, "--allow-write").returncode == 0  # the other two
    assert first_of(replaced) == 1003
    assert code_is_original(replaced.pid, program_of(build))


def test_no_call_is_wrong_while_the_lower_of_two_patches_is_inserted_and_removed(
    build: Builder, replaced: subprocess.Popen[str]
) -> None:
    """The lower patch comes and goes below one that does not change the result."""
    replacing = build("replacing.c", *OBJECT)
    for _ in range(rounds(300, 20)):
        lower = insert_patch(plan_patch(replaced.pid, replacing, "work", None, None)).record
        upper = insert_patch(plan_patch(replaced.pid, replacing, "unchanged", "work", None)).record
        assert remove_patch(replaced.pid, lower)
        assert remove_patch(replaced.pid, upper)
    assert code_is_original(replaced.pid, program_of(build))
    original, patched, wrong = results_of(replaced)
    assert wrong == 0
    assert original
    assert patched


def test_names_of_the_program_are_found(build: Builder, replaced: subprocess.Popen[str]) -> None:
    """A static variable by its source file, a variable of the program, and strlen, which is chosen at run time."""
    replacing = build("replacing.c", *OBJECT)
    for name in ("uses_spread", "length"):
        assert patch(f"{replacing}:{name}", "-p", replaced.pid, "--allow-write", "--persist").returncode == 0
    assert ask(replaced) == "1003 77078 104"


def test_inlined_copies_are_counted(build: Builder, replaced: subprocess.Popen[str]) -> None:
    replacing = build("replacing.c", *OBJECT)
    done = patch(f"{replacing}:spread", "-p", replaced.pid, "--allow-write", "--persist")
    assert done.stderr.endswith("\ndprobes: warning: 1 inlined copy of 'spread' is not patched: uses_spread\n")


def test_a_missing_build_id_is_mentioned_and_a_wrong_one_refused(
    build: Builder, replaced: subprocess.Popen[str]
) -> None:
    replacing, program = build("replacing.c", *OBJECT), program_of(build)
    identity = ElfFile.open(program).build_id
    done = patch(f"{replacing}:uses_spread", "-p", replaced.pid, "--allow-write", "--persist")
    assert done.stderr == (
        f"dprobes: note: '{replacing}' names no build-id, so '{program}' may be another build\n"
        f"hint: --build-id {identity}\n"
    )
    known = patch(f"{replacing}:work", "-p", replaced.pid, "--allow-write", "--persist", "--build-id", identity)
    assert (known.returncode, known.stderr) == (0, "")
    other = patch(f"{replacing}:length", "-p", replaced.pid, "--allow-write", "--build-id", "12ab")
    assert other.stderr == f"dprobes: error: --build-id names build 12ab, and '{program}' has the build-id {identity}\n"


def test_a_patch_waits_until_no_frame_is_left(build: Builder, replaced: subprocess.Popen[str]) -> None:
    replacing = build("replacing.c", *OBJECT)
    waiting = ("-p", replaced.pid, "--allow-write", "--persist", "--when-idle", "0.1")
    busy = patch(f"{replacing}:next_line", *waiting)
    assert busy.stderr.endswith(
        f"dprobes: error: 'next_line' was not patched: a frame of the function may be on the stack of thread "
        f"{replaced.pid}\n"
    )
    assert patches_of(replaced.pid)
    assert not any(is_active(replaced.pid, each) for each in patches_of(replaced.pid))
    assert patch(f"{replacing}:length", *waiting).returncode == 0
    assert patch(f"{replacing}:next_line", *waiting[:-2]).returncode == 0  # the next call is patched
    assert ask(replaced).split()[2] == "104"
    assert replaced.stdin is not None
    replaced.stdin.write("q\n")
    replaced.stdin.flush()
    assert replaced.wait(TIMEOUT) == 0


def test_the_example_of_the_documentation_works(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "live-patches.md").read_text()
    program, fix, *_ = re.findall(r"```c\n(.*?)```", page, re.DOTALL)
    headers = [word for name in ("stdio", "stdlib", "unistd") for word in ("-include", f"{name}.h")]
    compiling = next(line for line in page.splitlines() if line.startswith("$ gcc")).split()[1:]
    (tmp_path / "parser.c").write_text(program)
    (tmp_path / "fix.c").write_text(fix)
    for command in (["gcc", "-O2", *headers, "-o", "parser", "parser.c"], compiling):
        subprocess.run(command, check=True, timeout=TIMEOUT, cwd=tmp_path)
    with running(tmp_path / "parser", "4K") as parser:
        assert await_line(parser) == "size 4, refused 0\n"
        done = patch(f"{tmp_path / 'fix.so'}:parse_size", "-p", parser.pid, "--allow-write", "--persist")
        assert done.returncode == 0
        while (line := await_line(parser)) == "size 4, refused 0\n":
            pass
        assert line == "size 4096, refused 0\n"


def test_a_method_of_cpp_is_replaced(build: Builder) -> None:
    program = build("priced.cc", compiler="g++")
    repricing = build("repricing.cc", *OBJECT, "-fno-exceptions", compiler="g++")
    with running(program, stdin=subprocess.PIPE) as shop:
        assert await_line(shop) == "ready\n"
        assert [ask(shop, "tea"), ask(shop, "milk")] == ["30", "40"]
        arguments = ("-p", shop.pid, "--allow-write", "--persist")
        assert patch(f"{repricing}:price=Shop::price", *arguments).returncode == 0
        assert [ask(shop, "tea"), ask(shop, "milk")] == ["530", "40"]


def test_a_function_of_the_c_library_is_replaced_in_python(build: Builder) -> None:
    resolving = build("resolving.c", *OBJECT)
    script = "import socket, sys\nfor _ in sys.stdin: print(socket.getaddrinfo('127.0.0.1', 80)[0][4][0], flush=True)"
    with running(sys.executable, "-c", script, stdin=subprocess.PIPE) as python:
        assert ask(python) == "127.0.0.1"
        arguments = ("-p", python.pid, "--allow-write", "--persist")
        assert patch(f"{resolving}:getaddrinfo=libc.so.6:getaddrinfo", *arguments).returncode == 0
        assert ask(python) == "127.0.0.9"
        assert patch("--remove", "-p", python.pid, "--allow-write").returncode == 0
        assert ask(python) == "127.0.0.1"


REFUSED = {
    "CONSTRUCTOR": (
        (), "'{path}' has constructors or destructors, which are not run",
        "link it with -nostartfiles, and initialize variables with constants",
    ),
    "DESTRUCTOR": (
        (), "'{path}' has constructors or destructors, which are not run",
        "link it with -nostartfiles, and initialize variables with constants",
    ),
    "CODE": (("-Wl,-z,notext",), "'{path}' has relocations in its code", "compile it with -fPIC"),
    "THREAD": ((), "'{path}' has or uses a thread-local variable, which needs the dynamic linker", None),
    "FOREIGN_THREAD": (
        (), "'{path}' has or uses a thread-local variable 'of_program', which needs the dynamic linker", None,
    ),
    "CHOSEN": (
        (), "'{path}' has a function that is chosen at run time (IFUNC)", "give the one to be used a plain name",
    ),
    "KIND": ((), "'{path}' has a relocation of kind 33, which is not supported", "compile it with -fPIC"),
    "WRITABLE": (("-Wl,--no-warn-rwx-segments",), "'{path}' has memory that is both writable and executable", None),
    "PACKED": (
        ("-Wl,-z,pack-relative-relocs",), "'{path}' has packed relocations (DT_RELR)",
        "link it with -z nopack-relative-relocs",
    ),
    "MISSING": ((), "'nowhere', which '{path}' uses, is not a symbol of process {pid}", None),
    "AMBIGUOUS": (
        (), "'table_size' is the name of several symbols of '{program}'",
        'declare one with its source file: __asm__("\\"replaced.c:table_size\\"")',
    ),
    "PROGRAM_CHOOSES": (
        (),
        (
            "'chosen' in '{program}' is chosen at run time (IFUNC), and process {pid} has not called it yet, so its "
            "address is unknown"
        ),
        "call another function, or one of the functions that it can choose, in the patch",
    ),
    "BUILD": ((), "'{path}' was made for build 0123456789abcdef, and '{program}' has the build-id {identity}", None),
}  # fmt: skip
"""Objects that are refused: flags for the compiler, message, and hint."""


@pytest.fixture(scope="module")
def unchanged(build: Builder) -> Iterator[subprocess.Popen[str]]:
    """A program that no patch of these tests changes."""
    with running(program_of(build), stdin=subprocess.PIPE) as process:
        assert await_line(process) == "ready\n"
        process.send_signal(signal.SIGSTOP)
        yield process


@pytest.mark.parametrize("reason", REFUSED)
def test_an_object_is_refused(reason: str, build: Builder, unchanged: subprocess.Popen[str]) -> None:
    flags, message, hint = REFUSED[reason]
    path, program = build("refused.c", *OBJECT, f"-DREASON_{reason}", *flags), program_of(build)
    done = patch(f"{path}:work", "-p", unchanged.pid, "--allow-write")
    identity = ElfFile.open(program).build_id
    wanted = message.format(path=path, pid=unchanged.pid, program=program, identity=identity)
    assert done.stderr == f"dprobes: error: {wanted}\n" + (f"hint: {hint}\n" if hint else "")
    assert done.returncode != 0
    assert patches_of(unchanged.pid) == []


def test_an_object_with_exceptions_is_refused(build: Builder, unchanged: subprocess.Popen[str]) -> None:
    path = build("refused.cc", *OBJECT, compiler="g++")
    assert patch(f"{path}:work", "-p", unchanged.pid, "--allow-write").stderr == (
        f"dprobes: error: '{path}' throws or handles exceptions, and its tables have no end mark\n"
        'hint: link it with "$(g++ -print-file-name=crtendS.o)" as the last file, or compile it -fno-exceptions\n'
    )


RUST = """#![no_std]
extern "C" {
    fn orig_work(x: i64) -> i64;
}
static mut CALLS: [i64; 4] = [0; 4];
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}
#[no_mangle]
pub unsafe extern "C" fn work(x: i64) -> i64 {
    CALLS[(x & 3) as usize] += 1;
    orig_work(x).wrapping_add(1_000_000)
}
"""


def test_a_function_is_replaced_by_one_in_rust(replaced: subprocess.Popen[str], tmp_path: Path) -> None:
    if shutil.which("rustc") is None:
        pytest.skip("rustc is not installed")
    (tmp_path / "fix.rs").write_text(RUST)
    flags = ("--crate-type", "cdylib", "-C", "panic=abort", "-O", "-C", "link-arg=-nostartfiles")
    subprocess.run(["rustc", *flags, "fix.rs", "-o", "fix.so"], cwd=tmp_path, check=True, capture_output=True)
    record = insert_patch(plan_patch(replaced.pid, tmp_path / "fix.so", "work", None, None)).record
    assert ask(replaced).split()[0] == "1001003"
    assert remove_patch(replaced.pid, record)
    assert ask(replaced).split()[0] == "1003"
    original, patched, wrong = results_of(replaced)
    assert wrong == 0
    assert original
    assert patched


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "{program}:work",
            "'{program}' is not a shared object for x86-64\nhint: make it with gcc -shared -fPIC -nostartfiles",
        ),
        ("{path}:wrok", "'{path}' has no function 'wrok'\nhint: did you mean 'work'?"),
        ("{path}:work=tiny", "'tiny' cannot begin with a jump: its first instruction: too few dead bytes follow it"),
        ("{path}:work=libnowhere.so.9:f", "process {pid} has no code of a module 'libnowhere.so.9'"),
    ],
)
def test_a_patch_is_refused(what: str, message: str, build: Builder, unchanged: subprocess.Popen[str]) -> None:
    names = {"path": build("replacing.c", *OBJECT), "program": program_of(build), "pid": unchanged.pid}
    done = patch(what.format(**names), "-p", unchanged.pid, "--allow-write")
    assert done.stderr == f"dprobes: error: {message.format(**names)}\n"


def test_a_stopped_process_is_not_patched(build: Builder, unchanged: subprocess.Popen[str]) -> None:
    replacing = build("replacing.c", *OBJECT)
    done = patch(f"{replacing}:work", "-p", unchanged.pid, "--allow-write", "--when-idle", "0")
    assert done.stderr.endswith("dprobes: error: 'work' was not patched: no thread can make a system call now\n")


def test_a_patch_needs_permission_to_write(build: Builder, unchanged: subprocess.Popen[str]) -> None:
    replacing = build("replacing.c", *OBJECT)
    done = patch(f"{replacing}:work", "-p", unchanged.pid)
    assert done.stderr.endswith("Error: a patch changes the code of the process: allow it with --allow-write\n")


def test_a_traced_process_is_not_patched(build: Builder, replaced: subprocess.Popen[str]) -> None:
    replacing = build("replacing.c", *OBJECT)
    ptrace_calls.seize(replaced.pid, follow=False)
    try:
        done = patch(f"{replacing}:length", "-p", replaced.pid, "--allow-write")
        assert done.stderr.endswith(
            f"dprobes: error: process {replaced.pid} is already traced by process {os.getpid()}\n"
        )
    finally:
        ptrace_calls.interrupt(replaced.pid)
        await_stop(replaced.pid)
        ptrace_calls.detach(replaced.pid)
    assert results_of(replaced)[2] == 0
