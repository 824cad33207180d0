"""The errors of DuckDB in a query, with the place in the query."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dprobes.diagnostics import Diagnostics, did_you_mean
from dprobes.errors import SourceError
from dprobes.lazypattern import lazy_pattern
from dprobes.source import SourceFile, Span

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["error_of", "message_of", "query_error"]

_NAME = "query"
_KIND = lazy_pattern(r"\A[A-Z][A-Za-z ]* Error: ")


def query_error(query: str, message: str, span: tuple[int, int] | None = None, hint: str | None = None) -> SourceError:
    """Return the error of a query; ``span`` is where in it."""
    diagnostics = Diagnostics()
    place = None if span is None else Span(SourceFile(_NAME, query), *span)
    diagnostics.error(place, message, hint=hint)
    return SourceError(list(diagnostics))


def error_of(query: str, error: Exception, tables: Iterable[str]) -> SourceError:
    """Return what is wrong with a query; ``tables`` are the names that it could have meant."""
    details = _details(error)
    message, hint = message_of(error), None
    if details.get("error_subtype") == "MISSING_ENTRY" and details.get("type") == "Table":
        name = str(details.get("name", ""))
        message = f"there is no table '{name}'"
        hint = (
            did_you_mean(name, [table for table in tables if table != name])
            or "'dprobes sql --list' prints what there is"
        )
    elif details.get("candidates"):
        names = [name.strip().strip('"') for name in str(details["candidates"]).split(",")]
        hint = did_you_mean(str(details.get("name", "")), names)
    return query_error(query, message, _span(query, details), hint)


def message_of(error: Exception) -> str:
    """Return what DuckDB says of an error, in one line and in our manner."""
    text = str(_details(error).get("exception_message") or error) or type(error).__name__
    line = _KIND.sub("", text.strip().splitlines()[0]).strip().rstrip("!.")
    words = line.split(maxsplit=1)
    if words and words[0].istitle():
        line = line[0].lower() + line[1:]
    return line


def _details(error: Exception) -> dict[str, Any]:
    """Return what DuckDB writes as JSON if it is told to."""
    _, brace, rest = str(error).partition("{")
    try:
        details = json.loads(brace + rest)
    except ValueError:
        return {}
    return details if isinstance(details, dict) else {}


def _span(query: str, details: dict[str, Any]) -> tuple[int, int] | None:
    try:
        position = int(details["position"])
        size = json.loads(details["location"])[1] if "location" in details else 1
    except (KeyError, ValueError, IndexError):
        return None
    data = query.encode("utf-8", "surrogateescape")  # places are counted in bytes
    start = len(data[:position].decode("utf-8", "replace"))
    end = len(data[: position + size].decode("utf-8", "replace"))
    return (start, end) if start < end <= len(query) else None
