"""Numbers for people."""

from __future__ import annotations

import pytest

from dprobes.keyed.table_layout import Bucket, bucket_of
from dprobes.keyed.table_text import estimated_quantile, power_bucket_label, quantity
from dprobes.rpn.keyed_tables import Unit


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (0, Unit.NANOSECONDS, "0 ns"),
        (999, Unit.NANOSECONDS, "999 ns"),
        (1200, Unit.NANOSECONDS, "1.2 us"),
        (1_234_567, Unit.NANOSECONDS, "1.23 ms"),
        (90_000_000_000, Unit.NANOSECONDS, "90 s"),
        (-1500, Unit.NANOSECONDS, "-1.5 us"),
        (4096, Unit.BYTES, "4 KiB"),
        (1023, Unit.BYTES, "1023 B"),
        (1 << 63, Unit.BYTES, "8 EiB"),
        (12345, Unit.NONE, "12345"),
        (2.5, Unit.NONE, "2"),
    ],
)
def test_a_number_with_its_unit(number: float, unit: Unit, text: str) -> None:
    assert quantity(number, unit) == text


def test_buckets_for_people() -> None:
    numbers = [0, 1, -1, 2, -3, 1023, 1024, 1 << 20, (1 << 63), -(1 << 63)]
    assert [power_bucket_label(bucket_of(number)) for number in numbers] == [
        "[0]", "[1]", "[-1]", "[2, 4)", "(-4, -2]", "[512, 1K)", "[1K, 2K)", "[1M, 2M)", "[8E, 16E)", "(-16E, -8E]",
    ]  # fmt: skip


def test_a_quantile_is_in_the_bucket_that_has_it() -> None:
    buckets = (Bucket(None, 0), Bucket(0, 10), Bucket(10, 20), Bucket(20, None))
    assert estimated_quantile(buckets, (0, 5, 5, 0), 50) == 9
    assert estimated_quantile(buckets, (0, 0, 10, 0), 50) == 15
    assert estimated_quantile(buckets, (0, 0, 10, 0), 99) == 19
    assert estimated_quantile(buckets, (0, 1, 1, 98), 99) is None
    assert estimated_quantile(buckets, (0, 0, 0, 0), 50) is None


def test_buckets_by_powers_of_two_have_units() -> None:
    labels = [power_bucket_label(bucket, Unit.NANOSECONDS) for bucket in (-11, -1, 0, 1, 2, 11, 31)]
    assert labels == [
        "(-2.05 us, -1.02 us]", "[-1 ns]", "[0 ns]", "[1 ns]", "[2 ns, 4 ns)", "[1.02 us, 2.05 us)", "[1.07 s, 2.15 s)",
    ]  # fmt: skip
