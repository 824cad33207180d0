"""Each name that ``list`` prints, in quotes, stands for exactly that function, in both languages."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.api.compiled_program import parse_c
from dprobes.cli.output.module_listing import function_rows
from dprobes.diagnostics import Diagnostics
from dprobes.errors import DprobesError
from dprobes.resolve.local_module import resolve
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.source_text import SourceFile
from dprobes.target.probed_module import Module
from integration.support import DPROBES, PROGRAMS, TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.rpn.rpn_program import Program
    from integration.support import Builder, Runner

LOOKED_AT = 150
"""Functions of a file; more take long with programs of Go and Rust."""


def quoted(name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return name if re.fullmatch("0x[0-9a-f]+", name) else f'"{escaped}"'


def in_rpn(path: Path, name: str) -> Program:
    return parse_source(SourceFile("n.rpn", f'name = "{path}"\noffset = {quoted(name)}\nexit\n'), Diagnostics())


def in_c(path: Path, name: str) -> Program:
    text = f'"{path}":{quoted(name)} {{ @ = count(); }}'
    return parse_c(SourceFile("n.dpc", text), Diagnostics(), CompileOptions(), "").programs[0]


def check(path: Path) -> list[str]:
    """Check a sample of the names that are listed; return all."""
    module = Module.load(path)
    rows = function_rows(module, "*")
    sample = random.Random(31).sample(rows, min(LOOKED_AT, len(rows)))
    wrong = []
    for name, _, offset, cost, *_ in sample:
        if cost.startswith("none"):
            continue
        for language in (in_rpn, in_c):
            try:
                found = [hex(each.offset) for each in resolve(language(path, name), module, Diagnostics()).probepoints]
            except DprobesError as error:
                wrong.append(f"{name}: {error}")
            else:
                wrong += [] if found == [offset] else [f"{name}: {found} and not {offset}"]
    assert wrong == []
    return [row[0] for row in rows]


@pytest.mark.parametrize(("compiler", "flag"), [("g++", "-O0"), ("g++", "-O2"), ("clang++", "-O2")])
def test_names_of_cpp(build: Builder, compiler: str, flag: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    names = check(build("listed.cpp", flag, "-std=c++17", compiler=compiler))
    assert "ns::Both::operator[](long) const" in names
    assert 'operator"" _km(unsigned long long)' in names
    assert "non-virtual thunk to ns::Both::g(int)" in names
    assert "_ZN2ns4BaseD0Ev" in names
    assert "ns::tagged[abi:cxx11]()" in names
    if flag == "-O0":
        assert "main::{lambda(int)#1}::operator()(int) const" in names
        assert "main::Local::s()" in names


def test_names_of_go(tmp_path: Path) -> None:
    if shutil.which("go") is None:
        pytest.skip("go is not installed (golang-go)")
    program = tmp_path / "listed"
    environment = os.environ | {"GOCACHE": str(tmp_path / "cache")}
    command = ["go", "build", "-o", str(program), str(PROGRAMS / "listed.go")]
    subprocess.run(command, env=environment, check=True, timeout=10 * TIMEOUT, capture_output=True)
    generic = [name for name in check(program) if name.startswith("main.") and "[" in name]
    assert len(generic) >= 5
    module = Module.load(program)
    for name in generic:
        (found,) = resolve(in_c(program, name), module, Diagnostics()).probepoints
        assert found.where == name
    assert len(resolve(in_c(program, "main.same[[]*"), module, Diagnostics()).probepoints) == 2


@pytest.mark.parametrize("flags", [[], ["-C", "symbol-mangling-version=v0"]], ids=["usual", "v0"])
def test_names_of_rust(tmp_path: Path, flags: list[str]) -> None:
    if shutil.which("rustc") is None:
        pytest.skip("rustc is not installed")
    program = tmp_path / "names"
    command = ["rustc", "-g", *flags, "-o", str(program)]
    done = subprocess.run(
        [*command, str(PROGRAMS / "names.rs")], capture_output=True, text=True, check=False, timeout=10 * TIMEOUT
    )
    if done.returncode:
        pytest.skip(f"rustc cannot compile here: {done.stderr[-200:]}")
    assert any("::take" in name for name in check(program))


def test_names_of_libraries(libc_path: Path) -> None:
    for path in (libc_path, libc_path.parent / "libstdc++.so.6"):
        if path.exists():
            check(path)


@pytest.fixture
def libc_path() -> Path:
    from dprobes.target.module_lookup import find_module

    found = find_module("libc.so.6")
    assert found is not None
    return found


@pytest.mark.parametrize("engine", ["ptrace", "inline"])
def test_functions_with_one_name_are_told_apart_by_their_files(tmp_path: Path, run: Runner, engine: str) -> None:
    (tmp_path / "first.c").write_text((PROGRAMS / "namesake.c").read_text())
    (tmp_path / "second.c").write_text("#define OTHER\n" + (PROGRAMS / "namesake.c").read_text())
    program = tmp_path / "namesakes"
    subprocess.run(["gcc", "-O1", "-o", program, tmp_path / "first.c", tmp_path / "second.c"], check=True)
    listed = subprocess.run([*DPROBES, "list", f"{program}:namesake"], capture_output=True, text=True, check=True)
    names = re.findall(r"^(\S+namesake) +\d", listed.stdout, re.MULTILINE)
    assert sorted(names) == ["first.c:namesake", "second.c:namesake"]
    text = f'name = "{program}"\n' + "".join(
        f'offset = "{name}"\nminor = {minor}\nexit\n' for minor, name in enumerate(sorted(names), 1)
    )
    result = run(text, ["--", str(program)], ["--engine", engine])
    assert [record["minor"] for record in result.records] == [1, 2, 1]


@pytest.mark.parametrize("engine", ["ptrace", "inline", "ebpf"])
def test_all_functions_of_one_name_are_probed_together(tmp_path: Path, run: Runner, engine: str) -> None:
    program = namesakes(tmp_path, "-g")
    text = f'name = "{program}"\noffset = "*:namesake"\nexit\n'
    result = run(text, ["--", str(program)], ["--engine", engine])
    assert [record["function"] for record in result.records] == [
        "first.c:namesake", "second.c:namesake", "first.c:namesake"
    ]  # fmt: skip
    assert re.findall(r"^0,0 +(\S+) +(\d) ", result.stderr, re.MULTILINE) == [
        ("first.c:namesake", "2"), ("second.c:namesake", "1")
    ]  # fmt: skip


def test_they_are_listed_with_their_source_lines(tmp_path: Path) -> None:
    program = namesakes(tmp_path, "-g")
    listed = subprocess.run([*DPROBES, "list", f"{program}:*:namesake"], capture_output=True, text=True, check=True)
    found = re.findall(r"^(\S+namesake) .* (\w+\.c:\d+)$", listed.stdout, re.MULTILINE)
    starts = [f"*{address}" for address in nm(program, "namesake")]
    asked = [part for start in starts for part in ("-ex", f"info line {start}")]
    told = subprocess.run(["gdb", "-batch", *asked, program], capture_output=True, text=True, check=True).stdout
    lines = [f"{file}:{line}" for line, file in re.findall(r'^Line (\d+) of "(?:.*/)?(\w+\.c)"', told, re.MULTILINE)]
    assert [source for _, source in found] == lines
    assert [name for name, _ in found] == [f"{line.partition(':')[0]}:namesake" for line in lines]
    place = f"{program}:second.c:namesake"
    located = subprocess.run([*DPROBES, "locate", place], capture_output=True, text=True, check=True).stdout
    (line,) = (each for each in lines if each.startswith("second.c"))
    assert f"function  second.c:namesake\nsource    {line}\n" in located


def test_other_functions_of_files(tmp_path: Path) -> None:
    program = namesakes(tmp_path)
    for pattern, names in (
        ("second.c:*", ["second.c:namesake"]),
        ("*:main", ["main"]),
        ("f*.c:*", ["first.c:namesake"]),
    ):
        listed = subprocess.run([*DPROBES, "list", f"{program}:{pattern}"], capture_output=True, text=True, check=True)
        found = [line.split()[0] for line in listed.stdout.splitlines()[1:]]
        assert [name for name in found if name in ("main", "other") or name.endswith("namesake")] == names
    done = subprocess.run([*DPROBES, "list", f"{program}:third.c:*"], capture_output=True, text=True, check=False)
    assert done.stderr == f"dprobes: error: 'third.c:*' matches no function of '{program}'\n"


def namesakes(directory: Path, *flags: str) -> Path:
    """Compile a program with two static functions called ``namesake``."""
    for name, start in (("first", ""), ("second", "#define OTHER\n")):
        (directory / f"{name}.c").write_text(start + (PROGRAMS / "namesake.c").read_text())
    program = directory / "namesakes"
    subprocess.run(["gcc", "-O1", *flags, "-o", program, "first.c", "second.c"], check=True, cwd=directory)
    return program


def nm(program: Path, name: str) -> list[str]:
    listed = subprocess.run(["nm", "-n", program], capture_output=True, text=True, check=True).stdout
    return [
        f"0x{address}" for address, symbol in re.findall(r"^(\w+) \w (\S+)$", listed, re.MULTILINE) if symbol == name
    ]


def test_a_compiled_program_carries_what_they_stand_for(tmp_path: Path) -> None:
    for name, start in (("first", ""), ("second", "#define OTHER\n")):
        (tmp_path / f"{name}.c").write_text(start + (PROGRAMS / "namesake.c").read_text())
    program, stripped, compiled = tmp_path / "namesakes", tmp_path / "bare" / "namesakes", tmp_path / "n.ppdf"
    subprocess.run(["gcc", "-O1", "-o", program, tmp_path / "first.c", tmp_path / "second.c"], check=True)
    stripped.parent.mkdir()
    subprocess.run(["strip", "-o", stripped, program], check=True)
    source = tmp_path / "n.dpc"
    source.write_text(
        'namesakes:second.c:namesake { printf("two"); }\nnamesakes:"first.c:namesake" { printf("one"); }\n'
    )
    subprocess.run([*DPROBES, "build", source, "-o", compiled, "--for", program], check=True)
    done = subprocess.run(
        [*DPROBES, "run", compiled, "--engine", "ptrace", "--", stripped], capture_output=True, text=True, check=True
    )
    assert re.findall(r"  (one|two)$", done.stdout, re.MULTILINE) == ["one", "two", "one"]
    source.write_text('namesakes:"*:namesake" { printf("%s", func); }\n')
    subprocess.run([*DPROBES, "build", source, "-o", compiled, "--for", program], check=True)
    done = subprocess.run(
        [*DPROBES, "run", compiled, "--engine", "ptrace", "--", stripped], capture_output=True, text=True, check=True
    )
    assert re.findall(r"^0,0 +(\S+) +(\d) ", done.stderr, re.MULTILINE) == [
        ("first.c:namesake", "2"), ("second.c:namesake", "1")
    ]  # fmt: skip
