"""The origin of records: the paper's "event" of a module, which a trace daemon is told before its first record."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.target.process_images import ProcessImages

__all__ = ["DataReader", "Place", "RecordSource"]

# The description of the probepoint that a record came from.

_NUMBER = r"0x[0-9a-f]+"
_DISTANCE = r" *[+-] *(0x[0-9a-f]+|[0-9]+)\Z"


@lru_cache(4096)
def routine_of(symbol: str) -> str:
    """Return the function in ``function+0x4``; nothing where there is only an offset in a file."""
    return "" if re.fullmatch(_NUMBER, symbol) else re.sub(_DISTANCE, "", symbol)


class DataReader(Protocol):
    """What the records of a program say (``LogRecord``, which knows this module)."""

    def values(self, record: Any, /) -> Mapping[str, object] | None:
        """Return the values of a record's data by their names; None if nothing is known of it."""

    def function(self, record: Any, /) -> str:
        """Return the function that a record with a place is of; nothing if nobody knows."""


@dataclass(frozen=True, slots=True)
class Place:
    """
    The place of a probe for people: its module, and the function and offset where it is.

    ``function`` is not empty where the probe stands for many functions, so that a record must say which. ``placed`` is
    the file offset of the breakpoint, if that is not at the place that was written. ``at_return`` says that it is the
    return of the function that is probed, ``is_paired`` that the program probes both its entry and its return.
    ``is_code`` says that hits are at ``symbol``; ``99hz`` of a sampler and the variable of a watchpoint are no code.
    ``reader`` is there where somebody has given the records' data names; places are the same whether or not.
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
        """The function that the probepoint is in, as far as the program or its symbols say; empty if they do not."""
        return self.function or (routine_of(self.symbol) if self.is_code else "")

    @property
    def is_at_ip(self) -> bool:
        """Whether the ip in a record is the address of ``symbol``."""
        return self.is_code and not self.at_return


_NAMED = re.compile(rb"%(?:\([^)\"]*\))?[^%\s\"({]{0,12}?[ak]")
"""``%a`` or ``%k`` of a template, with whatever stands between: a field, flags, a size."""


@dataclass(frozen=True, slots=True)
class RecordSource:
    """
    An inserted program, as those see it who take its records.

    ``number`` is unique among the sources of one writer, ``name`` what the user calls the program, ``module`` what it
    is a program of. ``build_ids`` are those of the module's files that it was resolved in, in hexadecimal; ``paths``
    say where these were. ``templates`` maps the names of template files, the directory file among them, to their bytes.
    ``derived`` has the text of another template file for each size of a word in bytes: made from what handlers log, for
    records without a template. The word size is in each record: a program may be in modules of both. ``images`` know
    what processes had mapped that have ended since, where an engine tells.
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
    """The kernel of another machine that records are from, a ``RunningKernel``; None if they are from this one."""

    @property
    def may_show_addresses(self) -> bool:
        """Whether a template may print addresses by their names, or call stacks."""
        contents = (*self.templates.values(), *(text.encode() for text in self.derived.values()))
        return any(_NAMED.search(text) is not None for text in contents)

    def details(self) -> dict[str, Any]:
        """Return everything but number, name and major as data for JSON."""
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
        Return the source that ``details`` was made of; what is missing, as in older files, gets its default.

        Raise ``ValueError`` if something is there that ``details`` never makes.
        """
        module, build_ids = details.get("module", name), details.get("build_ids", [])
        paths = details.get("paths", [])
        templates, derived = details.get("templates", {}), details.get("derived", {})
        if not isinstance(module, str):
            raise ValueError("the name of a module is no text")  # noqa: TRY004 - one error for all
        if not isinstance(build_ids, list) or not all(isinstance(each, str) for each in build_ids):
            raise ValueError("build-ids are no list of strings")
        if not isinstance(paths, list) or not all(isinstance(each, str) for each in paths):
            raise ValueError("paths are no list of strings")
        for files in (templates, derived):
            if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
                raise ValueError("templates are no strings")
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
