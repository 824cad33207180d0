"""Where columns are aligned, and where they have colours."""

from __future__ import annotations

import io

import pytest

from dprobes.formatters.line_formatter import columns_of


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"TERM": "xterm"}, "\x1b[1ma\x1b[0m"),
        ({"TERM": "xterm", "NO_COLOR": ""}, "\x1b[1ma\x1b[0m"),
        ({"TERM": "xterm", "NO_COLOR": "1"}, "a"),
        ({"TERM": "dumb"}, "a"),
        ({}, "a"),
    ],
)
def test_colours_are_where_the_user_wants_them(
    environment: dict[str, str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
        if name in environment:
            monkeypatch.setenv(name, environment[name])
    columns = columns_of(Terminal())
    assert columns is not None
    assert columns.shown("place", "a") == shown


def test_what_is_no_terminal_has_no_columns() -> None:
    assert columns_of(io.StringIO()) is None
