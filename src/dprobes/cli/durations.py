"""Times on the command line: ``10s``, ``500ms``, ``2m``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dprobes.lazypattern import lazy_pattern

if TYPE_CHECKING:
    from click import Context, Parameter

__all__ = ["DURATION"]

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_TEXT = lazy_pattern(r"(?P<number>[0-9]+(\.[0-9]+)?)(?P<unit>ms|s|m|h)?")


class _Duration(click.ParamType[float]):
    name = "time"

    def convert(self, value: Any, param: Parameter | None, ctx: Context | None) -> float:
        """Return a time in seconds; without a unit they are seconds."""
        match = _TEXT.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            self.fail(f"'{value}' is no time: write it like 10s, 500ms, 2m or 1h", param, ctx)
        seconds = float(match["number"]) * _UNITS[match["unit"] or "s"]
        if seconds <= 0:
            self.fail("a time of 0 never passes", param, ctx)
        return seconds


DURATION = _Duration()
"""The type of options that take a time, which becomes seconds."""
