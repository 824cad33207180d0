"""Programs for several modules, and blocks of the tool, as one file: it does what their source does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import dprobes as api
from dprobes.errors import EngineError
from integration.support import TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path

ENGINES = ["ptrace", pytest.param("ebpf", marks=pytest.mark.skipif(os.geteuid() != 0, reason="ebpf needs root"))]

LIBRARY = """
struct point { short x; struct { unsigned flags : 3; int y : 5; } in; struct point *next; };
static int moved;
int move(struct point *p, int by) { p->x += by; moved++; return p->x + p->in.y; }
"""
PROGRAM = """
#include <stdio.h>
struct point { short x; struct { unsigned flags : 3; int y : 5; } in; struct point *next; };
enum mode { SLOW, FAST = 5 };
int move(struct point *p, int by);
int step(enum mode mode, struct point *p) { return move(p, mode) + 1; }
int main(void) {
    struct point second = { 10, { 5, -3 }, 0 }, first = { 1, { 1, 2 }, &second };
    long total = 0;
    getchar();
    for (int n = 0; n < 4; n++) total += step(n & 1 ? FAST : SLOW, n < 2 ? &first : first.next);
    printf("%ld\\n", total);
    return 0;
}
"""
SOURCE = """
static long steps; global long far;
enum mode { SLOW, FAST = 5 };
begin { steps = 100; @seen[0] = sum(7); printf("begin %d %d", steps, FAST); }
program:step { steps++; @seen[p->x] = sum(p->in.y); printf("step %d by %s at %d", steps, mode, p->next == 0); }
libpoint.so:move { far += by; @moved[by] = count(); printf("move %d,%d by %d", p->x, p->in.y, by); }
return libpoint.so:move { printf("moved to %d: %d", p->x, retval); }
end {
    for (int i = 0; i < 20; i++) if (@seen[i]) printf("seen %d: %d", i, @seen[i]);
    printf("steps %d far %d", steps, far);
    clear(@seen);
}
"""


def dprobes(*arguments: str, status: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "dprobes", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        cwd=cwd,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


class Places:
    """A program and its library, with debug information in one directory, and stripped in another."""

    def __init__(self, directory: Path) -> None:
        self.full, self.bare = directory / "full", directory / "bare"
        self.full.mkdir()
        (directory / "point.c").write_text(LIBRARY)
        (directory / "program.c").write_text(PROGRAM)
        library, program = self.full / "libpoint.so", self.full / "program"
        flags = ["gcc", "-g", "-O1"]
        subprocess.run(
            [*flags, "-shared", "-fPIC", "-Wl,-soname,libpoint.so", directory / "point.c", "-o", library], check=True
        )
        subprocess.run([*flags, directory / "program.c", library, "-Wl,-rpath,$ORIGIN", "-o", program], check=True)
        shutil.copytree(self.full, self.bare)
        for path in (self.bare / "libpoint.so", self.bare / "program"):
            subprocess.run(["strip", path], check=True)
        source = SOURCE.replace("program:", f'"{program}":').replace("libpoint.so:", f'"{library}":')
        self.of_paths = directory / "paths.dpc"
        self.of_paths.write_text(source)
        self.source = directory / "points.dpc"
        self.source.write_text(SOURCE)
        self.compiled = directory / "points.ppdf"


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


def run_on(program: Path, file: Path, engine: str) -> tuple[list[str], str]:
    """Run a file on a program from before its first call to its end; return the lines that are printed."""
    target = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    words = [sys.executable, "-m", "dprobes", "run", str(file), "--engine", engine, "-p", str(target.pid)]
    run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    first = run.stdout.readline()  # of the block that is executed when all is inserted
    target.communicate(b"\n", timeout=TIMEOUT)
    assert target.returncode == 0
    out, err = run.communicate(timeout=TIMEOUT)
    assert run.returncode == 0, err
    return lines_of(first + out), err


def lines_of(text: str) -> list[str]:
    return [line.split("]  ")[-1] for line in text.splitlines()]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_does_on_stripped_modules_what_its_source_does(engine: str, places: Places) -> None:
    full, _ = run_on(places.full / "program", places.of_paths, engine)
    files = ("--for", str(places.full / "program"), "--for", str(places.full / "libpoint.so"))
    built = dprobes("build", str(places.source), *files, "-o", str(places.compiled))
    assert "for 'program' it is for 1 build of 'program'; for 'libpoint.so' it is for 1 build of" in built.stderr
    places.source.unlink()
    bare, _ = run_on(places.bare / "program", places.compiled, engine)
    assert bare == full
    assert bare[:5] == [
        "begin 100 5",
        "step 101 by SLOW at 0",
        "move 1,2 by 0",
        "moved to 1: 3",
        "step 102 by FAST at 0",
    ]
    assert bare[-5:-2] == ["seen 1: 4", "seen 10: -6", "steps 104 far 10"]
    assert sorted(bare[-2:]) == ["@moved[0]: 2", "@moved[5]: 2"]
    assert "seen 0: 7" in bare


def test_other_builds_of_one_module_are_refused(places: Places) -> None:
    files = ("--for", str(places.full / "program"), "--for", str(places.full / "libpoint.so"))
    dprobes("build", str(places.source), *files, "-o", str(places.compiled))
    subprocess.run(
        [
            "gcc",
            "-O2",
            "-shared",
            "-fPIC",
            "-Wl,-soname,libpoint.so",
            places.full.parent / "point.c",
            "-o",
            places.bare / "libpoint.so",
        ],
        check=True,
    )
    target = subprocess.Popen([places.bare / "program"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        said = dprobes("run", str(places.compiled), "-p", str(target.pid), status=1).stderr
    finally:
        target.communicate(b"\n", timeout=TIMEOUT)
    assert f"error: '{places.bare / 'libpoint.so'}' is build " in said
    assert f", but '{places.compiled}' was built for " in said
    assert target.returncode == 0


def test_verbs_tell_what_is_in_a_file(places: Places) -> None:
    files = ("--for", str(places.full / "program"), "--for", str(places.full / "libpoint.so"))
    dprobes("build", str(places.source), *files, "-o", str(places.compiled))
    shown = dprobes("show", str(places.compiled)).stdout.splitlines()
    assert [line for line in shown if line.startswith(("name = ", "// program ", "// a block"))] == [
        "// program 1 of 2",
        'name = "program"',
        "// program 2 of 2",
        'name = "libpoint.so"',
        f"// a block of the tool: begin, from {places.source}:4",
        f"// a block of the tool: end, from {places.source}:8",
    ]
    bytecode = dprobes("show", "--bpf", str(places.compiled)).stdout
    assert bytecode.count("// This code is for reading: each machine compiles the code that it runs.") == 2
    checked = dprobes("check", str(places.compiled)).stderr
    for module in ("program", "libpoint.so"):
        assert f"note: there is no module '{module}' on this machine; its probes are resolved when" in checked


def test_files_are_for_modules_of_the_program(places: Places) -> None:
    places.source.write_text("program:step { } libpoint.so:move { }")
    program = str(places.full / "program")
    done = dprobes("build", str(places.source), "--for", program, "-o", str(places.compiled), status=1)
    assert "error: there is no module 'libpoint.so' on this machine" in done.stderr
    assert "hint: name its file with --for FILE" in done.stderr
    done = dprobes("build", str(places.source), "--for", "/bin/sh", "-o", str(places.compiled), status=1)
    assert "error: '/bin/sh' is the file of no module of the program: 'program', 'libpoint.so'" in done.stderr
    assert not places.compiled.exists()


def test_the_api_inserts_companions(tmp_path: Path) -> None:
    source = tmp_path / "both.dpc"
    source.write_text(
        'libc.so.6:abs(int x) { @n[x] = count(); printf("abs %d", x); }\nlibz.so.1:zlibVersion { printf("zlib"); }'
    )
    target = "import ctypes; c = ctypes.CDLL(None); c.abs(3); ctypes.CDLL('libz.so.1').zlibVersion(); c.abs(4)"
    compiled = api.compile_file(source)
    compiled.save(tmp_path / "both.ppdf")
    for program in (compiled, api.load_ppdf(tmp_path / "both.ppdf")):
        with api.launch([sys.executable, "-S", "-c", target], engine="ptrace") as session:
            inserted = session.insert(program)
            assert [record.data[:1] for record in session.records()] == [b"\3", b"", b"\4"]
            assert session.wait() == 0
            assert [probe.counts.hits for probe in inserted.probepoints] == [2, 1]
            assert sorted(dict(inserted.tables()["n"].items()).values()) == [1, 1]


def test_the_api_has_nobody_who_executes_blocks(tmp_path: Path) -> None:
    source = tmp_path / "block.dpc"
    source.write_text("libc.so.6:abs { } every 1s { }")
    with (
        api.launch(["true"], engine="ptrace") as session,
        pytest.raises(
            EngineError, match=r"the program has a block 'every 1s', which only 'dprobes run' executes"
        ) as error,
    ):
        session.insert(api.compile_file(source))
    assert error.value.hint == "run it with 'dprobes run', or leave out 'begin', 'every' and 'end'"
