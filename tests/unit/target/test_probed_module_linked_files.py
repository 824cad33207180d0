"""The libraries of programs are those that ldd finds."""

# ruff: noqa: SIM300 - expected == actual
from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.target.module_lookup import find_module
from dprobes.target.probed_module import linked_files, preloaded_files

if TYPE_CHECKING:
    from unit.target.conftest import Toolbox


def found_by_ldd(program: Path) -> dict[str, Path]:
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return {name: Path(path).resolve() for name, path in re.findall(r"^\s+(\S+) => (/\S+) ", said, re.MULTILINE)}


def test_libraries_are_those_of_ldd(tools: Toolbox) -> None:
    expected = found_by_ldd(Path("/bin/bash"))
    found = linked_files(Path("/bin/bash"))
    assert expected == {name: found[name] for name in expected}
    library = tools.build("libbeside.so", {"beside.c": "int beside(void) { return 1; }"}, "-shared", "-fPIC")
    main = {"user.c": "int beside(void); int main(void) { return beside(); }"}
    program = tools.build("beside", main, f"-L{library.parent}", "-lbeside", "-Wl,-rpath,/nowhere:$ORIGIN")
    assert library.resolve() == linked_files(program)["libbeside.so"]
    expected = found_by_ldd(program)
    assert {"libbeside.so", "libc.so.6"} == expected.keys()
    assert expected == {name: linked_files(program)[name] for name in expected}


@pytest.mark.parametrize("tag", ["--enable-new-dtags", "--disable-new-dtags"])
def test_a_directory_of_the_environment_counts_as_the_loader_has_it(
    tools: Toolbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tag: str
) -> None:
    """Before DT_RUNPATH, and after DT_RPATH."""
    library = tools.build("libtwice.so", {"twice.c": "int twice(void) { return 1; }"}, "-shared", "-fPIC")
    main = {"user.c": "int twice(void); int main(void) { return twice(); }"}
    program = tools.build(f"user{tag}", main, f"-L{library.parent}", "-ltwice", f"-Wl,-rpath,$ORIGIN,{tag}")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    shutil.copy(library, tmp_path)
    found = linked_files(program)["libtwice.so"]
    assert found_by_ldd(program)["libtwice.so"] == found
    assert found == find_module("libtwice.so", command=str(program))
    assert found == (tmp_path if tag == "--enable-new-dtags" else library.parent) / "libtwice.so"
    assert find_module("libtwice.so") is None


def test_preloaded_files_are_named_by_blanks_or_colons(tools: Toolbox) -> None:
    library = tools.build("libpre.so", {"pre.c": "int pre(void) { return 1; }"}, "-shared", "-fPIC")
    libc = Path("/lib/x86_64-linux-gnu/libc.so.6").resolve()
    assert [library.resolve(), libc] == list(preloaded_files({"LD_PRELOAD": f"{library}:no.so libc.so.6"}))
    assert [] == list(preloaded_files({}))
