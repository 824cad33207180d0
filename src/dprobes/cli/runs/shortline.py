"""
Lines of ``run`` that are read without click, which takes a tenth of a start to import: ``-e`` with frequent options.

Whatever else a line has, or has in another form, is for click: also what is wrong, and what is to be said about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.cli.durations import seconds_of
from dprobes.cli.runs.runoptions import RunOptions
from dprobes.engines.registry import named_engine
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["FLAGS", "VALUES", "options_of"]


def _process_id(word: str) -> int:
    number = int(word)
    if not word.isdecimal() or number < 1:
        raise ValueError
    return number


def _engine(word: str) -> str:
    named_engine(word)
    return word


VALUES: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "-e": ("text", str),
    "-p": ("pid", _process_id),
    "--pid": ("pid", _process_id),
    "-c": ("command_line", str),
    "--command": ("command_line", str),
    "--engine": ("engine_name", _engine),
    "--duration": ("duration", seconds_of),
}
"""Options with a value: the name of that, and what makes it of a word; ``ValueError`` leaves the line to click."""

FLAGS: Mapping[str, str] = {"-v": "verbose", "--verbose": "verbose", "--allow-write": "allow_write"}


def options_of(arguments: Sequence[str]) -> RunOptions | None:
    """Return what a line says, if it consists of nothing but these options and perhaps a command behind ``--``."""
    if not arguments or arguments[0] != "run":
        return None
    values: dict[str, object] = {}
    words = iter(arguments[1:])
    try:
        for word in words:
            if word in VALUES:
                name, made = VALUES[word]
                value = made(next(words))
                if name == "text" and name in values:
                    value = f"{values[name]}\n{value}"  # as click joins them
                values[name] = value
            elif word in FLAGS:
                values[FLAGS[word]] = True
            elif word == "--":
                values["arguments"] = tuple(words)
            else:
                return None
    except (ValueError, EngineError, StopIteration):
        return None
    return RunOptions(**values) if "text" in values else None  # type: ignore[arg-type] # the tests compare with click
