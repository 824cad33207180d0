"""The old name of the compiler, with the options of 2002."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """\
#include "limit.h"
static long large;
libc.so.6:malloc(size) when (size > LIMIT) {
    large += BY;
}
"""


def dpcc(directory: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "dprobes.cli.dpcc", *arguments],
        capture_output=True, text=True, check=False, cwd=directory,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    return done


def test_a_program_becomes_rpn_beside_it(tmp_path: Path) -> None:
    (tmp_path / "large.dpc").write_text(PROGRAM)
    (tmp_path / "headers").mkdir()
    (tmp_path / "headers" / "limit.h").write_text("#define LIMIT 1000\n")
    done = dpcc(tmp_path, "-Iheaders", "-DBY=3", "large.dpc")
    assert (done.stdout, done.stderr) == ("", "")
    rpn = (tmp_path / "large.rpn").read_text()
    assert rpn.startswith('name = "libc.so.6"\nwordsize = 8\nmajor = 0\nvars = 1\n')
    assert "    push 1000\n" in rpn
    assert "//" not in rpn
    # With comments, and elsewhere.
    dpcc(tmp_path, "-c", "-I", "headers", "-D", "BY=3", "-o", "other.rpn", "large.dpc")
    other = (tmp_path / "other.rpn").read_text()
    assert "    // large += BY\n" in other
    assert [line for line in other.splitlines() if "//" not in line] == rpn.splitlines()
    # It is a program like any other.
    checked = subprocess.run(
        [sys.executable, "-m", "dprobes", "check", "large.rpn"], cwd=tmp_path, capture_output=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, b"")


def test_the_tree_is_printed(tmp_path: Path) -> None:
    (tmp_path / "a.dpc").write_text("libc.so.6:abs { }\n")
    lines = dpcc(tmp_path, "-a", "-o", "-", "a.dpc").stdout.splitlines()
    assert lines[0] == "ProgramTree"
    assert lines.index('name = "libc.so.6"') > 2
    assert not (tmp_path / "a.rpn").exists()


def test_errors_of_the_preprocessor_may_be_ignored(tmp_path: Path) -> None:
    (tmp_path / "a.dpc").write_text('#include "missing.h"\nlibc.so.6:abs { }\n')
    done = dpcc(tmp_path, "a.dpc", status=2)
    assert done.stderr.startswith("a.dpc:1:1: error: cannot find include file")
    assert not (tmp_path / "a.rpn").exists()
    done = dpcc(tmp_path, "-p", "a.dpc")
    assert done.stderr.startswith("a.dpc:1:1: warning: cannot find include file")
    assert (tmp_path / "a.rpn").exists()


def test_errors_are_shown_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.dpc").write_text("libc.so.6:abs { nothing = 1; }\n")
    assert dpcc(tmp_path, "a.dpc", status=2).stderr.startswith("a.dpc:1:17: error: 'nothing' is not defined")
    assert list(tmp_path.iterdir()) == [tmp_path / "a.dpc"]
    assert dpcc(tmp_path, "b.dpc", status=2).stderr.startswith("error: cannot read 'b.dpc'")
    assert dpcc(tmp_path, "-o", "a.dpc", "a.dpc", status=2).stderr.startswith("a.dpc:1:17: error: ")
    (tmp_path / "c.rpn").write_text("libc.so.6:abs { }\n")
    assert "would be written over" in dpcc(tmp_path, "c.rpn", status=2).stderr


def test_each_module_has_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.dpc").write_text('libc.so.6:abs { printf("x"); }\nlibz.so.1:zlibVersion { }\nend { }\n')
    done = dpcc(tmp_path, "a.dpc")
    assert done.stderr.splitlines() == [
        "dprobes: note: the program is for 2 modules: there is a file for each",
        "dprobes: note: RPN source does not have the formats of 'printf' and 'begin', 'every' and 'end'",
        "hint: 'dprobes run FILE.dpc' has all of it",
    ]
    assert (tmp_path / "a.rpn").read_text().startswith('name = "libc.so.6"\n')
    assert (tmp_path / "a.2.rpn").read_text().startswith('name = "libz.so.1"\n')


def test_help_has_both_old_names(tmp_path: Path) -> None:
    shown = dpcc(tmp_path, "-h").stdout
    assert shown == dpcc(tmp_path, "-?").stdout
    assert shown.startswith("Usage: dpcc [OPTIONS] FILE\n")


def test_it_is_installed_under_its_name() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["dpcc"] == "dprobes.cli.dpcc:main"
