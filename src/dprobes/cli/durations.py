"""Times on the command line: ``10s``, ``500ms``, ``2m``."""

from __future__ import annotations

from dprobes.lazypattern import lazy_pattern

__all__ = ["seconds_of"]

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_TEXT = lazy_pattern(r"(?P<number>[0-9]+(\.[0-9]+)?)(?P<unit>ms|s|m|h)?")


def seconds_of(text: str) -> float:
    """Return a time in seconds, which they are without a unit; ``ValueError`` says what is wrong with the text."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' is no time: write it like 10s, 500ms, 2m or 1h")
    seconds = float(match["number"]) * _UNITS[match["unit"] or "s"]
    if seconds <= 0:
        raise ValueError("a time of 0 never passes")
    return seconds
