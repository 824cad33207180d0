"""Times of day and spans of time, as ``dprobes log --since`` and ``--until`` take them."""

from __future__ import annotations

import datetime as dt
import re

from dprobes.lazypattern import lazy_pattern

__all__ = ["TIME_FORMS", "Anchor", "needs_bounds", "parse_time"]

TIME_FORMS = "10m, 14:30, '2026-11-22 14:30:05.5', @1763785600, start+5s or end-10m"
"""The forms of a time, for messages."""

Anchor = tuple[int, int] | None
"""When the first and the last record were written."""

_UNITS = {"ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "d": 86400 * 10**9}
_SPAN = r"(?:\d+(?:\.\d+)?(?:ms|[smhd]))+"
_PART = lazy_pattern(r"(\d+)(?:\.(\d+))?(ms|[smhd])")
_ANCHORED = lazy_pattern(rf"(start|end|now)(?:([+-])({_SPAN}))?\Z")
_SECONDS = lazy_pattern(r"@(\d{1,12})(?:\.(\d{1,9}))?\Z")
_TIME_OF_DAY = lazy_pattern(r"\d\d?:\d\d(?::\d\d(?:\.\d+)?)?\Z")


def needs_bounds(text: str) -> bool:
    """Return whether a time is one before the end or after the start of the records."""
    return text.startswith(("start", "end"))


def parse_time(text: str, *, now: int, bounds: Anchor = None) -> int:
    """
    Return a time in nanoseconds since 1970; raise ``ValueError`` if ``text`` is none.

    ``10m`` is ten minutes before ``now``. A time without a zone is local, one without a date is of today.
    """
    text = text.strip()
    if re.fullmatch(_SPAN, text):
        return now - _span(text)
    if match := _ANCHORED.match(text):
        name, sign, span = match.groups()
        start, end = bounds or (now, now)
        base = {"start": start, "end": end, "now": now}[name]
        return base + (0 if span is None else _span(span) * (1 if sign == "+" else -1))
    if match := _SECONDS.match(text):
        return int(match[1]) * 10**9 + int((match[2] or "").ljust(9, "0"))
    if _TIME_OF_DAY.match(text):
        today = dt.datetime.fromtimestamp(now // 10**9).astimezone().date()
        text = f"{today.isoformat()} {text if text.index(':') == 2 else f'0{text}'}"
    when = dt.datetime.fromisoformat(text).astimezone()
    whole = when.replace(microsecond=0)
    return int(whole.timestamp()) * 10**9 + when.microsecond * 1000


def _span(text: str) -> int:
    return sum(
        (int(whole) * 10 ** len(fraction) + int(fraction or 0)) * _UNITS[unit] // 10 ** len(fraction)
        for whole, fraction, unit in _PART.findall(text)
    )
