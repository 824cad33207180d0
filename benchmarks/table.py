"""The rows of the table: ours beside a peer's, in a unit that all of a row share."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

__all__ = ["BenchmarkError", "Measurement", "Unit", "print_table"]

HEADER = ("what", "dprobes", "peer", "its figure", "ratio")


class BenchmarkError(Exception):
    """A failed measurement, with the reason as its text."""


class Unit(enum.Enum):
    """What the numbers of a row are; smaller is better but for RATE."""

    MICROSECONDS = "us"
    KIB = "KiB"
    RATE = "/s"
    TIMES = "x"


@dataclass(frozen=True, slots=True)
class Measurement:
    """Hold one row of the table; None is what could not be measured."""

    what: str
    ours: float | None
    peer: str = ""
    peers: float | None = None
    unit: Unit = Unit.MICROSECONDS

    def __post_init__(self) -> None:
        for figure in (self.ours, self.peers):
            assert figure is None or math.isfinite(figure), f"{self.what}: {figure} was not measured"

    def cells(self) -> tuple[str, str, str, str, str]:
        """Return the row as text."""
        return (self.what, amount(self.ours, self.unit), self.peer, amount(self.peers, self.unit), self._ratio())

    def _ratio(self) -> str:
        if not self.ours or not self.peers or self.ours < 0 or self.peers < 0:
            return ""
        if self.unit is Unit.RATE or self.ours > self.peers:
            return f"{self.ours / self.peers:.2f}"
        return f"1/{self.peers / self.ours:.2f}"


def amount(value: float | None, unit: Unit) -> str:
    """Return a number with its unit."""
    if value is None:
        return "-"
    match unit:
        case Unit.KIB:
            return f"{value / 1024:.1f} MiB" if value >= 10_000 else f"{value:.0f} KiB"
        case Unit.RATE:
            return f"{value / 1000:.0f} k/s"
        case Unit.TIMES:
            return f"{value:.2f} x"
        case Unit.MICROSECONDS if value >= 10_000:
            return f"{value / 1000:.0f} ms"
    return f"{value * 1000:.1f} ns" if abs(value) < 1 else f"{value:.1f} us"


def print_table(measurements: list[Measurement]) -> None:
    """Print rows in columns, a header before them."""
    rows = [HEADER, *(measurement.cells() for measurement in measurements)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(HEADER))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
