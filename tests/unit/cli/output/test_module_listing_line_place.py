"""Lines of the source as places on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.cli.output.module_listing import split_lines

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("place", "parts"),
    [
        ("bash:shell.c:400", ("bash", "shell.c", 400, 400)),
        ("/usr/bin/bash:builtins/echo.def:10-20", ("/usr/bin/bash", "builtins/echo.def", 10, 20)),
        ("bash:main", None),
        ("bash:400", None),
        ("shop:shop::Cart::add", None),
        ("shop:shop::Cart::add+4", None),
        (":shell.c:4", None),
    ],
)
def test_a_line_is_told_from_other_places(place: str, parts: tuple[str, str, int, int] | None) -> None:
    assert split_lines(place) == parts


def test_a_file_offset_behind_a_path_with_a_colon_is_none(tmp_path: Path) -> None:
    place = f"{tmp_path}/a:b.c:16"
    assert split_lines(place) == (f"{tmp_path}/a", "b.c", 16, 16)
    (tmp_path / "a:b.c").write_bytes(b"")
    assert split_lines(place) is None
