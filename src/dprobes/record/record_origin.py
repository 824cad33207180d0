"""
Origin of records: the paper's "event" of a module, announced to a trace daemon before its first record.

Records have times of CLOCK_MONOTONIC. ``WallClock`` has the offset of the wall clock from it.
"""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from dprobes.target.process_images import ProcessImages

__all__ = [
    "BOOT_ID",
    "DataReader",
    "Place",
    "RecordSource",
    "WallClock",
    "boot_id",
    "boot_uuid",
    "wall_offset",
    "wall_time",
]

# The description of the probepoint that a record came from.

_NUMBER = r"0x[0-9a-f]+"
_DISTANCE = r" *[+-] *(0x[0-9a-f]+|[0-9]+)\Z"


@lru_cache(4096)
def routine_of(symbol: str) -> str:
    """Return the name before ``+`` in a place such as ``function+0x4``, or an empty string for an offset in a file."""
    return "" if re.fullmatch(_NUMBER, symbol) else re.sub(_DISTANCE, "", symbol)


class DataReader(Protocol):
    """
    Reader of the data of a program's records.

    The parameters are ``LogRecord`` objects, although the types do not show it: the module of that class imports this
    one.
    """

    def values(self, record: Any, /) -> Mapping[str, object] | None:
        """Return the values of a record's data by name, or None if the data have no description."""

    def function(self, record: Any, /) -> str:
        """Return the function of a record that has a place, or an empty string if it is unknown."""


@dataclass(frozen=True, slots=True)
class Place:
    """
    Place of a probepoint, as users see it: its module, and the function and offset.

    ``function`` is not empty if the probe definition matches many functions, so that each record must name its own.
    ``placed`` is the file offset of the breakpoint if it differs from the place in the program. ``at_return`` is True
    for the return of the probed function, ``is_paired`` if the program probes both entry and return. ``is_code`` is
    True if ``symbol`` is a place in code, and False for the ``99hz`` of a sampler or the variable of a watchpoint.
    ``reader`` is set if the fields of the records' data have names; it is ignored in comparisons.
    """

    module: str
    symbol: str
    function: str = ""
    placed: int | None = None
    at_return: bool = False
    is_paired: bool = False
    is_code: bool = True
    reader: DataReader | None = field(default=None, compare=False, repr=False)

    @property
    def routine(self) -> str:
        """Function of the probepoint according to the program or its symbols, or empty if they do not name it."""
        return self.function or (routine_of(self.symbol) if self.is_code else "")

    @property
    def is_at_ip(self) -> bool:
        """True if the item ``ip`` of a record is the address of ``symbol``."""
        return self.is_code and not self.at_return


_NAMED = re.compile(rb"%(?:\([^)\"]*\))?[^%\s\"({]{0,12}?[ak]")
"""A ``%a`` or ``%k`` of a template, with the field, flags and size in between."""


@dataclass(frozen=True, slots=True)
class RecordSource:
    """
    Inserted program, as the consumers of its records see it.

    ``number`` is unique among the sources of one writer, ``name`` is the user's name of the program, and ``module`` the
    probed module. ``build_ids`` has the build ids, in hexadecimal, of the module's files in which it was resolved, and
    ``paths`` their paths. ``templates`` maps the names of template files, the directory file among them, to their
    bytes. ``derived`` has another template file for each word size in bytes: it is derived from the values that
    handlers log, for records without a template. The word size is in each record, because a program may be in modules
    of both. ``images`` has the mappings of processes that have ended since, if the engine reports them.
    """

    number: int
    name: str
    module: str = ""
    major: int = 0
    build_ids: tuple[str, ...] = ()
    templates: Mapping[str, bytes] = field(default_factory=dict)
    paths: tuple[str, ...] = ()
    derived: Mapping[int, str] = field(default_factory=dict)
    images: ProcessImages | None = field(default=None, compare=False)
    kernel: Any = field(default=None, compare=False)
    """The kernel of another machine that records are from, a ``RunningKernel``, or None for this machine."""

    @property
    def may_show_addresses(self) -> bool:
        """True if a template may print an address by name, or a call stack."""
        contents = (*self.templates.values(), *(text.encode() for text in self.derived.values()))
        return any(_NAMED.search(text) is not None for text in contents)

    def details(self) -> dict[str, Any]:
        """Return all attributes except ``number``, ``name``, ``major``, ``images`` and ``kernel`` as data for JSON."""
        return {
            "module": self.module,
            "build_ids": list(self.build_ids),
            "paths": list(self.paths),
            "templates": {name: data.decode("utf-8", "surrogateescape") for name, data in self.templates.items()},
            "derived": {str(size): text for size, text in self.derived.items()},
        }

    @classmethod
    def from_details(cls, number: int, name: str, major: int, details: Mapping[str, Any]) -> Self:
        """
        Create the source that ``details`` describes. Keys that older files lack get their defaults.

        Raise ``ValueError`` for contents that the ``details`` method never produces.
        """
        module, build_ids = details.get("module", name), details.get("build_ids", [])
        paths = details.get("paths", [])
        templates, derived = details.get("templates", {}), details.get("derived", {})
        if not isinstance(module, str):
            raise ValueError("the name of a module is not text")  # noqa: TRY004 - one error for all
        if not isinstance(build_ids, list) or not all(isinstance(each, str) for each in build_ids):
            raise ValueError("build-ids are not a list of strings")
        if not isinstance(paths, list) or not all(isinstance(each, str) for each in paths):
            raise ValueError("paths are not a list of strings")
        for files in (templates, derived):
            if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
                raise ValueError("templates are not strings")
        return cls(
            number,
            name,
            module,
            major,
            tuple(build_ids),
            {file: text.encode("utf-8", "surrogateescape") for file, text in templates.items()},
            tuple(paths),
            {int(size): text for size, text in derived.items()},
        )


# Identification of the current boot of the machine.

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""The file with the random boot id that the kernel generates at each boot (random(4))."""


def boot_id() -> str:
    """Return the boot id of the current boot, or an empty string if the kernel does not provide one."""
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text(encoding="ascii").strip()
    return ""


def boot_uuid() -> UUID:
    """Return the boot id as a UUID; a random UUID if the kernel does not provide one."""
    from uuid import UUID, uuid4

    try:
        return UUID(boot_id())
    except ValueError:
        return uuid4()


_STEP = 10_000_000
"""Smallest change of the wall clock, in nanoseconds, that counts as a step or a drift."""


def wall_offset() -> int:
    """Return the offset in nanoseconds that converts CLOCK_MONOTONIC to nanoseconds since 1970-01-01 UTC."""
    return time.time_ns() - time.monotonic_ns()


class WallClock:
    """
    The offset from CLOCK_MONOTONIC to the wall clock, updated only if the clock was set or has drifted.

    Between updates the offset is constant, and converted times stay in order.
    """

    def __init__(self) -> None:
        self.offset = wall_offset()

    def look(self) -> int:
        """Return the current difference between CLOCK_REALTIME and CLOCK_MONOTONIC in nanoseconds."""
        offset = wall_offset()
        if abs(offset - self.offset) > _STEP:
            self.offset = offset
        return self.offset


# The time of day as text.

_NANOSECONDS = 1_000_000_000


def wall_time(time_: int | None, wall_offset: int) -> str | None:
    """
    Return a record's time in ISO 8601 format, in UTC: ``2026-11-22T04:30:00.123456789Z``.

    Return None if the record has no time, or if the offset is 0, which means unknown.
    """
    return None if time_ is None or not wall_offset else _iso(time_ + wall_offset)


def _iso(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, _NANOSECONDS)
    try:
        date = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"{seconds}.{rest:09}"
    return f"{date}.{rest:09}Z"
