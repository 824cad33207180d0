"""The system calls of x86-64 and i386, by name: ``systemcalls.txt`` beside this module."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ARGUMENT_COUNT", "SystemCall", "system_calls"]

ARGUMENT_COUNT = 6
"""How many arguments a system call can have."""


@dataclass(frozen=True, slots=True)
class SystemCall:
    """A system call: its number in x86-64 and in i386, None where there is none, and (type, name) of each parameter."""

    name: str
    wide: int | None
    narrow: int | None
    parameters: tuple[tuple[str, str], ...]


@cache
def system_calls() -> Mapping[str, SystemCall]:
    """Return all system calls, by name."""
    text = resources.files(__package__).joinpath("systemcalls.txt").read_text(encoding="ascii")
    calls = (_call(line) for line in text.splitlines() if not line.startswith("#"))
    return {call.name: call for call in calls}


def _call(line: str) -> SystemCall:
    name, wide, narrow, *rest = line.split(" ", 3)
    parameters = tuple(_parameter(text) for text in rest[0].split(", ")) if rest else ()
    return SystemCall(name, _number(wide), _number(narrow), parameters)


def _number(text: str) -> int | None:
    return None if text == "-" else int(text)


def _parameter(text: str) -> tuple[str, str]:
    type_name, _, name = text.rpartition(" ")
    return type_name, name
