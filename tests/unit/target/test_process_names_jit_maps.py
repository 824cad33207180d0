"""The lists of just-in-time compilers: those of the process itself, however they grow, and nobody else's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.target import process_names
from dprobes.target.code_names import LocatedFunction
from dprobes.target.process_names import JitMap

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE = Path(f"/tmp/perf-{os.getpid()}.map")


@pytest.fixture(autouse=True)
def _no_file(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(process_names, "_INTERVAL", -1)
    monkeypatch.setattr(process_names, "_SHARE", 0)
    FILE.unlink(missing_ok=True)
    yield
    FILE.unlink(missing_ok=True)


def test_functions_are_found_as_they_come() -> None:
    listed = JitMap(os.getpid())
    assert listed.function_at(0x1000) is None
    FILE.write_text("1000 20 fib\n0x1100 0x8 with blanks: f(int)\nno line\n2000 0 empty\n")
    assert listed.function_at(0x101F) == LocatedFunction(0x1000, 0x1020, "fib")
    assert listed.function_at(0x1020) is None
    assert listed.function_at(0x1100) == LocatedFunction(0x1100, 0x1108, "with blanks: f(int)")
    assert listed.function_at(0x2000) == LocatedFunction(0x2000, 0x2001, "empty")
    with FILE.open("a") as file:
        file.write("1000 10 moved\n3000 4 late\n")
    assert listed.function_at(0x3000) == LocatedFunction(0x3000, 0x3004, "late")
    assert listed.function_at(0x1000) == LocatedFunction(0x1000, 0x1010, "moved")


def test_what_is_appended_is_read_alone_and_what_is_written_anew_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = JitMap(os.getpid())
    FILE.write_text("".join(f"{0x1000 + 16 * n:x} 10 first{n}\n" for n in range(1000)))
    assert listed.function_at(0x1000) == LocatedFunction(0x1000, 0x1010, "first0")
    sizes: list[int] = []
    pattern = process_names._LINE

    class Counting:
        def finditer(self, data: bytes) -> object:
            sizes.append(len(data))
            return pattern.finditer(data)

    monkeypatch.setattr(process_names, "_LINE", Counting())
    with FILE.open("a") as file:
        file.write("90000 10 late\n91000 10 half")
    assert listed.function_at(0x90000) == LocatedFunction(0x90000, 0x90010, "late")
    assert listed.function_at(0x91000) is None
    with FILE.open("a") as file:
        file.write(" a line\n")
    assert listed.function_at(0x91000) == LocatedFunction(0x91000, 0x91010, "half a line")
    assert sizes == [14, 21]
    assert listed.function_at(0x1000) == LocatedFunction(0x1000, 0x1010, "first0")
    FILE.write_text("".join(f"{0x1000 + 16 * n:x} 10 second{n}\n" for n in range(2000)))
    assert listed.function_at(0x1000 + 16 * 1999) == LocatedFunction(0x8CF0, 0x8D00, "second1999")
    assert listed.function_at(0x1000) == LocatedFunction(0x1000, 0x1010, "second0")
    assert listed.function_at(0x90000) is None


def test_links_and_other_kinds_of_files_are_not_read(tmp_path: Path) -> None:
    target = tmp_path / "secret"
    target.write_text("1000 20 secret\n")
    FILE.symlink_to(target)
    assert JitMap(os.getpid()).function_at(0x1000) is None
    FILE.unlink()
    os.mkfifo(FILE)
    assert JitMap(os.getpid()).function_at(0x1000) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
def test_a_file_of_another_user_is_not_read() -> None:
    FILE.write_text("1000 20 wrong\n")
    os.chown(FILE, 65534, 65534)
    assert JitMap(os.getpid()).function_at(0x1000) is None
    os.chown(FILE, 0, 0)
    assert JitMap(os.getpid()).function_at(0x1000) is not None


def test_lists_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_names, "_ROWS_MAX", 3)
    monkeypatch.setattr(process_names, "_NAME_MAX", 5)
    FILE.write_bytes(b"".join(b"%x 10 \xff%d-and-more\n" % (0x1000 + 16 * n, n) for n in range(9)))
    listed = JitMap(os.getpid())
    assert listed.function_at(0x1000) == LocatedFunction(0x1000, 0x1010, "\\xff0-an")
    assert listed.function_at(0x1020) is not None
    assert listed.function_at(0x1030) is None
