"""Programs in DProbes C where programs of 64 and 32 bits have one name."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.dpc.compiler import compile_text
from dprobes.preprocessor import preprocess
from dprobes.source_text import SourceFile
from integration.debug_comparison import dprobes
from integration.support import (
    DPROBES,
    I386_COMPILER,
    TIMEOUT,
    Builder,
    await_line,
    await_message,
    environment,
    running,
)

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
#include <unistd.h>
struct link { long number; char *name; struct link *next; short last; };
__attribute__((noinline)) long work(struct link *link, long n)
{
    __asm__ volatile("" ::: "memory");
    return link->last + n;
}
struct link second = {7, "second", 0, 33}, first = {5, "first", &second, 44};
int main(int count, char **words)
{
    char go;
    if (count > 1 && (write(1, "\\n", 1) < 0 || read(0, &go, 1) < 0)) return 1;  /* it waits */
    return work(&first, sizeof(long)) == 0;
}
"""
LAID_OUT = """
struct link { long number; char *name; struct link *next; short last; };
"%s":work(p, n) { struct link *link = (struct link *)p; printf("%%s %%d %%d", link->next->name, link->next->last, n); }
"""
INDEPENDENT = 'wordtwin:work(p, n) { @calls++; printf("%d %lu %lx", n, n, (long)-1); }'
ENGINES = [
    "ptrace",
    "inline",
    pytest.param("ebpf", marks=pytest.mark.skipif(os.geteuid() != 0, reason="ebpf needs root")),
]


@pytest.fixture
def twins(build: Builder, tmp_path: Path) -> tuple[Path, Path]:
    """Return a program of 64 bits and one of 32 bits, which have one name."""
    if shutil.which(I386_COMPILER) is None:
        pytest.skip(f"{I386_COMPILER} is not installed")
    source = tmp_path / "wordtwin.c"
    source.write_text(SOURCE)
    found = []
    for bits in (64, 32):
        made = build(str(source), "-O1", i386=bits == 32, name=f"wordtwin{bits}")
        (tmp_path / str(bits)).mkdir()
        found.append(tmp_path / str(bits) / "wordtwin")
        shutil.copy(made, found[-1])
    return found[0], found[1]


def printed(text: str) -> list[str]:
    """Return what handlers have printed, without time and process."""
    return [line.split("]  ", 1)[1] for line in text.splitlines() if "]  " in line]


@pytest.mark.parametrize("engine", ["ptrace", "inline"])
def test_what_depends_on_words_is_left_out_of_the_other_file(twins: tuple[Path, Path], engine: str) -> None:
    wide, narrow = twins
    program = LAID_OUT % "wordtwin"
    done = dprobes("run", "--engine", engine, "-e", program, "--", "sh", "-c", f"{wide}; {narrow}; true")
    assert printed(done.stdout) == ["second 33 8"]
    assert f"{narrow}: the program cannot be inserted here" in done.stderr
    assert "the program is for words of 8 bytes, and those of i386 have 4" in done.stderr


@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_that_is_named_gets_a_program_for_its_words(twins: tuple[Path, Path], engine: str) -> None:
    for file, size in zip(twins, (8, 4), strict=True):
        done = dprobes("run", "--engine", engine, "-e", LAID_OUT % file, "--", str(file))
        assert printed(done.stdout) == [f"second 33 {size}"]


def through_both(twins: tuple[Path, Path], engine: str, program: str) -> tuple[list[str], str]:
    """Return what a program prints that is inserted into both, which are found by their name, and what is said."""
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(running(file, "wait", stdin=subprocess.PIPE)) for file in twins]
        for target in started:
            await_line(target)
        command = [*DPROBES, "run", "--engine", engine, "-e", program]
        client = stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
        )
        said = await_message(client, "active")
        for target in reversed(started):
            target.communicate("x", timeout=TIMEOUT)
        client.send_signal(signal.SIGINT)
        output, rest = client.communicate(timeout=TIMEOUT)
    return printed(output), said + rest


@pytest.mark.skipif(os.geteuid() != 0, reason="ebpf needs root")
def test_the_kernel_gets_programs_for_its_files_of_one_word_size(twins: tuple[Path, Path]) -> None:
    found, said = through_both(twins, "ebpf", LAID_OUT % "wordtwin")
    assert found == ["second 33 8"]
    assert f"{twins[1]}: the program cannot be inserted here" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="ebpf needs root")
def test_the_kernel_gets_what_does_not_depend_on_words_for_both(twins: tuple[Path, Path]) -> None:
    found, said = through_both(twins, "ebpf", INDEPENDENT)
    assert found == ["4 4 ffffffff", "8 8 ffffffffffffffff"]
    assert "cannot be inserted" not in said


@pytest.mark.parametrize("engine", ["ptrace", "inline"])
def test_what_does_not_depend_on_words_is_inserted_everywhere(twins: tuple[Path, Path], engine: str) -> None:
    wide, narrow = twins
    done = dprobes("run", "--engine", engine, "-e", INDEPENDENT, "--", "sh", "-c", f"{wide}; {narrow}; true")
    assert printed(done.stdout) == ["8 8 ffffffffffffffff", "4 4 ffffffff"]
    assert "cannot be inserted" not in done.stderr
    assert "is written" not in done.stderr  # nothing is said of the spelling of what the compiler writes


@pytest.mark.parametrize(
    "program",
    [
        'libc.so.6:write(int fd, void *data, size_t n) when (n > 4) { printf("%d %p %lu", fd, data, n) }',
        'libc.so.6:kill(int pid, int number) { printf("%s %d %d %x", comm, tid, pid + 1, number); @[pid] = count(); }',
        "libc.so.6:malloc(size) { @[comm, tid] = hist(size); @bytes = sum(size); }",
        'libc.so.6:puts(char *text) when (str(text) == "x") { printf("%s %c", str(text), *text) }',
        'static int n; thread long m; libc.so.6:malloc(size) { n++; m += size; if (m > n) printf("%ld %lx", m, ~m); }',
    ],
)
def test_programs_that_are_for_both_word_sizes(program: str) -> None:
    source = SourceFile("-e", program)
    made = compile_text(preprocess(source, Diagnostics()), Diagnostics()).compilations
    assert "wordsize" not in made[0].source


@pytest.mark.parametrize(
    "program",
    [
        'libc.so.6:write(char **data) { printf("%s", str(data[1])) }',
        'libc.so.6:write { printf("%d", sizeof(long)) }',
        'return libc.so.6:write { printf("%d", elapsed) }',
        'static long n; libc.so.6:malloc(size) { n += size; printf("%ld", n); }',
    ],
)
def test_programs_that_are_for_one_word_size(program: str) -> None:
    source = SourceFile("-e", program)
    made = compile_text(preprocess(source, Diagnostics()), Diagnostics()).compilations
    assert made[0].source.splitlines()[1] == "wordsize = 8"


def test_a_compiled_program_keeps_its_words(twins: tuple[Path, Path], tmp_path: Path) -> None:
    wide, narrow = twins
    source, compiled = tmp_path / "twin.dpc", tmp_path / "twin.ppdf"
    source.write_text(LAID_OUT % "wordtwin")
    dprobes("build", str(source), "-o", str(compiled), "--for", str(wide))
    done = dprobes("run", "--engine", "ptrace", str(compiled), "--", "sh", "-c", f"{wide}; {narrow}; true")
    assert printed(done.stdout) == ["second 33 8"]
    assert f"'{narrow}' is for i386, but '{compiled}' was built for modules of x86_64" in done.stderr


@pytest.mark.parametrize("engine", ["ptrace", "inline"])
def test_a_library_is_that_of_the_command(twins: tuple[Path, Path], engine: str) -> None:
    program = 'libc.so.6:_exit(n) { printf("%d %d", n, sizeof(long)); }'
    for file, size in zip(twins, (8, 4), strict=True):
        done = dprobes("run", "--engine", engine, "-e", program, "--", str(file))
        assert printed(done.stdout) == [f"0 {size}"]
        assert "is written" not in done.stderr
