"""Numbers of tables for people: with their units, histograms' buckets as words, and quantiles that buckets estimate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.keyed.layout import bucket_of
from dprobes.rpn.tables import TableKind, Unit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.keyed.layout import Bucket
    from dprobes.rpn.tables import Table

__all__ = ["QUANTILES", "bucket_label", "estimated_quantile", "power_text", "quantity"]

QUANTILES = (50, 90, 99)
"""The quantiles that are shown of a histogram, in percent."""

_BINARY = ("", "K", "M", "G", "T", "P", "E")
_TIMES = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"))


def quantity(number: float, unit: Unit) -> str:
    """Return a number with its unit: ``1.2 ms``, ``4 KiB``; a number without one as it is."""
    if number < 0:
        return f"-{quantity(-number, unit)}"
    match unit:
        case Unit.NANOSECONDS:
            for size, name in _TIMES:
                if number >= size:
                    return f"{_short(number / size)} {name}"
            return f"{_short(number)} ns"
        case Unit.BYTES:
            size = 0
            while number >= 1024 and size + 1 < len(_BINARY):
                number, size = number / 1024, size + 1
            return f"{_short(number)} {_BINARY[size]}iB" if size else f"{_short(number)} B"
        case _:
            return str(number) if isinstance(number, int) else f"{number:.0f}"


def _short(number: float) -> str:
    """Return a number with at most three digits that say something, and all of them before the point."""
    text = f"{number:.2f}" if number < 10 else f"{number:.1f}" if number < 100 else f"{number:.0f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def power_text(exponent: int) -> str:
    """Return a power of two for people, such as ``64K``."""
    size, rest = divmod(exponent, 10)
    return f"{1 << rest}{_BINARY[size]}" if size < len(_BINARY) else f"2^{exponent}"


def power_bucket_label(bucket: int) -> str:
    """Return the numbers of a bucket by powers of two (``layout.bucket_of``) for people."""
    if bucket in (-1, 0, 1):
        return f"[{bucket}]"
    low, high = power_text(abs(bucket) - 1), power_text(abs(bucket))
    return f"[{low}, {high})" if bucket > 0 else f"(-{high}, -{low}]"


def bucket_label(table: Table, bucket: Bucket) -> str:
    """Return the numbers of a bucket of a table for people."""
    low, high = bucket
    if low is None:
        assert high is not None
        return f"(..., {quantity(high, table.unit)})"
    if high is None:
        return f"[{quantity(low, table.unit)}, ...)"
    if table.kind is TableKind.HIST and table.unit is Unit.NONE:
        return power_bucket_label(bucket_of(low))
    if high == low + 1:
        return f"[{quantity(low, table.unit)}]"
    if high <= 0 and table.kind is TableKind.HIST:
        return f"({quantity(low - 1, table.unit)}, {quantity(high - 1, table.unit)}]"
    return f"[{quantity(low, table.unit)}, {quantity(high, table.unit)})"


def estimated_quantile(buckets: Sequence[Bucket], counts: Sequence[int], percent: float) -> float | None:
    """
    Return what a part of all numbers is not above, as if the numbers of a bucket were spread over it evenly.

    None where that is in a bucket without a bound, or there is no number.
    """
    total = sum(counts)
    if not total:
        return None
    rank = percent / 100 * total
    before = 0
    for (low, high), count in zip(buckets, counts, strict=True):
        if count and before + count >= rank:
            if low is None or high is None:
                return None
            return min(low + (high - low) * (rank - before) / count, high - 1)
        before += count
    return None
