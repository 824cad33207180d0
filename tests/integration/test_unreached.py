"""What is said at the end of runs that reached nothing: what ran instead, and what was probably meant."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the ebpf engine needs root")
EBPF = ["--engine", "ebpf"]
INSERTED = "dprobes: note: the probepoints were inserted, but never reached\n"


@needs_root
def test_another_program_of_that_name_is_named(build: Builder, run: Runner, tmp_path: Path) -> None:
    program = build("hotloop.c")
    other = shutil.copy(program, tmp_path / "hotloop")
    script = tmp_path / "start"
    script.write_text(f"#!{other}\n")
    script.chmod(0o755)
    source = f'name = "{program}"\noffset = tick\nexit\n'
    said = run(source, ["--", str(other), "5"], EBPF).stderr
    where = f"and the probepoints are in '{program}'; programs that it starts are probed as well\n"
    assert said.endswith(f"{INSERTED}hint: the command executes '{other}', {where}")
    said = run(source, ["--", str(script)], EBPF).stderr
    assert said.endswith(f"{INSERTED}hint: the command executes '{other}' for the script '{script}', {where}")


@needs_root
def test_a_library_that_the_program_is_not_linked_with_is_named(build: Builder, run: Runner, tmp_path: Path) -> None:
    program = build("hotloop.c")
    other = shutil.copy(build("hotloop.c", "-shared", "-fPIC", name="libother.so"), tmp_path / "libother.so")
    said = run(f'name = "{other}"\noffset = tick\nexit\n', ["--", str(program), "5"], EBPF).stderr
    assert said.endswith(f"{INSERTED}hint: the command executes '{program}', which is not linked with '{other}'\n")


@pytest.mark.alone
@needs_root
def test_nothing_is_said_of_the_program_that_did_run(build: Builder, run: Runner) -> None:
    program = build("hotloop.c")
    said = run('name = "libc.so.6"\noffset = getpwuid\nexit\n', ["--", str(program), "5"], EBPF).stderr
    assert said.endswith(INSERTED)


def test_a_file_of_that_name_that_was_mapped_is_named(build: Builder, run: Runner, tmp_path: Path) -> None:
    program = build("hotloop.c")
    other = shutil.copy(program, tmp_path / "hotloop")
    said = run(f'name = "{program}"\noffset = tick\nexit\n', ["--", str(other), "5"]).stderr
    assert said.endswith(
        f"dprobes: error: no probepoint was inserted: no process mapped '{program}' as code\n"
        f"hint: processes mapped '{other}': is that the intended one?\n"
    )


OWN_PUTENV = """
#include <stdio.h>
int putenv(char *text) { return puts(text) < 0; }
"""
CALLER = """
#include <stdlib.h>
int main(void) { static char text[] = "A=B"; return putenv(text); }
"""
WORK = """
#include <stdio.h>
int work(int n) { __asm__ volatile("" : "+r"(n)); return n * 3 + 1; }
int main(int argc, char **argv) { (void)argv; printf("%d\\n", work(argc) + work(argc + 1)); return 0; }
"""


def compiled(directory: Path, name: str, source: str, *options: str) -> Path:
    program = directory / name
    command = ["gcc", "-O2", *options, "-o", str(program), "-x", "c", "-"]
    subprocess.run(command, input=source, text=True, check=True)
    return program


@needs_root
@pytest.mark.parametrize("engine", ["ptrace", "ebpf"])
@pytest.mark.parametrize("way", ["linked", "preloaded", "in the program"])
def test_another_function_of_that_name_is_named(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, way: str
) -> None:
    library = compiled(tmp_path, "libenv.so", OWN_PUTENV, "-shared", "-fPIC", "-Wl,-soname,libenv.so")
    other = library
    if way == "linked":
        program = compiled(
            tmp_path, "caller", CALLER, f"-Wl,-rpath,{tmp_path}", f"-L{tmp_path}", "-Wl,--no-as-needed,-l:libenv.so"
        )
    elif way == "preloaded":
        program = compiled(tmp_path, "caller", CALLER)
        monkeypatch.setenv("LD_PRELOAD", str(library))
    else:
        other = program = compiled(tmp_path, "caller", OWN_PUTENV + CALLER)
    said = run('name = "libc.so.6"\noffset = putenv\nexit\n', ["--", str(program)], ["--engine", engine]).stderr
    assert said.endswith(
        f"{INSERTED}hint: 'putenv' is in '{other}', too, which may be called instead: probe '{other.name}:putenv'\n"
    )


@needs_root
@pytest.mark.parametrize("engine", ["ptrace", "ebpf"])
def test_inlined_calls_of_the_function_are_named(run: Runner, tmp_path: Path, engine: str) -> None:
    program = compiled(tmp_path, "worker", WORK, "-g")
    source = f'name = "{program}"\noffset = work\nexit\n'
    said = run(source, ["--", str(program)], ["--engine", engine]).stderr
    places = r"main(\+0x[0-9a-f]+)?, main\+0x[0-9a-f]+"
    hint = rf"hint: calls of 'work' were inlined, at {places}: 'inline worker:work' probes them\n"
    assert re.fullmatch(hint, said.partition(INSERTED)[2])
    text = f"inline {program}:work {{ @n = count() }}"
    done = subprocess.run(
        [sys.executable, "-m", "dprobes", "run", "--engine", engine, "-e", text, "--", str(program)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "@n: 2\n" in done.stdout  # what the hint says is true
    subprocess.run(["strip", "-g", program], check=True)
    assert run(source, ["--", str(program)], ["--engine", engine]).stderr.endswith(INSERTED)


@needs_root
@pytest.mark.parametrize("engine", ["ptrace", "ebpf"])
def test_of_many_functions_those_are_named_that_another_library_has(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    names = ("putenv", "setenv", "clearenv", "unsetenv")
    library = compiled(
        tmp_path, "libenv.so", "".join(f"int {name}(void) {{ return 0; }}\n" for name in names), "-shared", "-fPIC"
    )
    monkeypatch.setenv("LD_PRELOAD", str(library))
    source = 'name = "libc.so.6"\noffset = *env\nexit\noffset = getpw*\nexit\n'
    said = run(source, ["--", str(compiled(tmp_path, "caller", CALLER))], ["--engine", engine]).stderr
    found = re.search(r"hint: (.*) and 1 more are in '(.*)', too, which may be called instead: probe '(.*)'\n$", said)
    assert found is not None
    assert set(re.findall("'(.*?)'", found[1])) < set(names)
    assert found[2] == str(library)
    assert found[3].startswith("libenv.so:")


OPENED = """
#include <dlfcn.h>
int main(int argc, char **argv) { int (*f)(int) = dlsym(dlopen(argv[1], RTLD_NOW), "twice"); return f(argc) != 4; }
"""


def test_a_library_of_the_same_name_is_named_by_its_path(run: Runner, tmp_path: Path) -> None:
    twice = "int twice(int n) { return 2 * n; }"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        compiled(tmp_path / name, "libtwice.so", twice, "-shared", "-fPIC", f"-Wl,-soname,libtwice-{name}.so")
    probed, opened = (tmp_path / name / "libtwice.so" for name in ("a", "b"))
    program = compiled(tmp_path, "opener", OPENED, f"-L{tmp_path / 'a'}", "-Wl,--no-as-needed,-l:libtwice.so",
                       f"-Wl,-rpath,{tmp_path / 'a'}")  # fmt: skip
    (tmp_path / "a" / "libtwice-a.so").symlink_to(probed)
    said = run(f'name = "{probed}"\noffset = twice\nexit\n', ["--", str(program), str(opened)]).stderr
    assert said.endswith(
        f"{INSERTED}hint: 'twice' is in '{opened}', too, which may be called instead: probe '{opened}:twice'\n"
    )
