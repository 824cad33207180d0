"""Files have the name under which people and processes know them."""

# ruff: noqa: SIM300 - expected == actual
from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.target.module_lookup import module_name

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def server(tmp_path: Path) -> Path:
    (tmp_path / "checker").write_bytes(b"")
    (tmp_path / "server").symlink_to("checker")
    (tmp_path / "stranger").write_bytes(b"")
    return tmp_path / "checker"


@pytest.mark.parametrize(
    ("soname", "known", "expected"),
    [
        (None, [], "checker"),
        (None, ["server"], "server"),
        (None, ["stranger", "nothing", "", "server"], "server"),
        (None, ["checker", "server"], "checker"),
        ("libcheck.so.1", [], "libcheck.so.1"),
        ("libcheck.so.1", ["server"], "server"),
        ("libcheck.so.1", ["checker"], "checker"),
        ("libcheck.so.1", ["libcheck.so.1", "server"], "libcheck.so.1"),
        ("../strange", [], "checker"),
        ("", [], "checker"),
    ],
)
def test_a_known_name_is_better_than_that_of_the_file(
    server: Path, soname: str | None, known: list[str], expected: str
) -> None:
    assert expected == module_name(str(server), soname, known)


def test_a_path_of_a_program_means_the_file_that_it_leads_to(server: Path) -> None:
    assert "server" == module_name(str(server), None, [str(server.with_name("server"))])
    assert "checker" == module_name(str(server), None, [str(server.with_name("stranger"))])


def test_what_is_no_file_keeps_its_name() -> None:
    assert "[vdso]" == module_name("[vdso]", None, ["python3"])
    assert "memfd:code" == module_name("/memfd:code", None, [])
