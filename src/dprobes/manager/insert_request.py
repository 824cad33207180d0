"""The arguments of the manager's verb ``insert``, checked and converted to the types of other modules."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dprobes.engines.engine_interface import EngineOptions, Scope
from dprobes.engines.engine_registry import AUTO, engine_row, named_engine
from dprobes.engines.overload_guard import overhead_of
from dprobes.errors import EngineError, ManagerError
from dprobes.formatters import LOG_FORMATS
from dprobes.record.log_record import ABOUT_RECORDS, Item
from dprobes.runs.run_steps import Request

if TYPE_CHECKING:
    from dprobes.manager.manager_messages import InsertArguments, ScopeArguments
    from dprobes.ppdf.ppdf_model import Ppdf

__all__ = ["InsertRequest", "check_format", "checked_insertion"]

_NAME_MAX = 255
"""Maximum size of a program's name in bytes, as of a file name (NAME_MAX of limits.h)."""

_SHOWN = 40
"""Maximum number of characters that are shown of a refused name."""


@dataclass(frozen=True, slots=True)
class InsertRequest:
    """A checked request for an insertion: the arguments, and the values derived from them."""

    arguments: InsertArguments
    ppdf: Ppdf
    request: Request
    items: Item


def checked_insertion(given: InsertArguments) -> InsertRequest:
    """Return the checked request; raise ``FormatError`` for an invalid PPDF, ``ManagerError`` for other errors."""
    from dprobes.ppdf.ppdf_file import decode

    if given.merge and given.replace:
        raise ManagerError("a program is either merged (--merge) or replaces another one (--replace)")
    items = Item(given.items)
    engine, endpoint = _engine(given.engine)
    ppdf = decode(given.ppdf)
    scope = replace(_scope(given.scope), endpoint=endpoint)
    own: dict[str, object] = {"pid_namespace": given.pid_namespace, "exact": given.exact}
    if given.ring_size is not None:
        own["ring_size"] = given.ring_size
    options = EngineOptions(
        allow_write=given.allow_write,
        core_directory=given.core_directory or ".",
        overhead=_overhead(given.overhead),
        replaceable=True,
        own=own,
    )
    _check_name(given.name)
    check_format(given.format)
    kept = (items & sum(Item)) & ~ABOUT_RECORDS | Item.MAJOR | Item.MINOR
    return InsertRequest(given, ppdf, Request(engine, scope, options), kept)


def _engine(text: str) -> tuple[str, str | None]:
    """
    Return the name of an engine and its endpoint, None without one, from a text such as ``gdb=HOST:PORT``.

    Raise ``ManagerError`` for an invalid text, and for an engine that the manager cannot use.
    """
    try:
        name, argument = named_engine(text)
    except EngineError as error:
        raise ManagerError(error.message, hint=error.hint) from None
    if name != AUTO and not engine_row(name).is_managed:
        raise ManagerError(f"a program that is inserted cannot have the {name} engine", hint="use 'dprobes run'")
    return name, argument


def _overhead(given: str | None) -> float | None:
    try:
        return None if given is None else overhead_of(given)
    except EngineError as error:
        raise ManagerError(error.message, hint=error.hint) from None


def _scope(given: ScopeArguments) -> Scope:
    scope = Scope(pid=given.pid, cgroup=given.cgroup, uid=given.uid, follow=given.follow, program=given.program)
    if scope.program is not None and (scope.pid is None or not scope.program.startswith("/")):
        raise ManagerError("'program' of a scope is the path of what its process 'pid' is about to execute")
    if sum(each is not None for each in (scope.pid, scope.cgroup, scope.uid)) > 1:
        raise ManagerError("a scope is one of a process, a cgroup, and a user")
    return scope


def _check_name(name: str | None) -> None:
    """Raise ``ManagerError`` for an invalid name of a program; names are printed in tables."""
    if name is not None and (not name.isprintable() or not 0 < len(os.fsencode(name)) <= _NAME_MAX):
        shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..."
        raise ManagerError(
            f"a program cannot be named {shown!r}",
            hint=f"a name is a string of 1 to {_NAME_MAX} bytes without control characters",
        )


def check_format(name: str) -> None:
    """Raise ``ManagerError`` if there is no formatter of that name."""
    if name not in LOG_FORMATS:
        raise ManagerError(f"there is no format '{name}'", hint=f"formats are {', '.join(LOG_FORMATS)}")
