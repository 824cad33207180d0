"""Readings of performance counters."""

from __future__ import annotations

import os
import struct

import pytest

from dprobes.platform.linux.perf_calls import read_counter


@pytest.mark.parametrize(
    ("value", "enabled", "running", "expected"),
    [
        (600_025, 700, 700, 600_025),
        (0, 0, 0, 0),
        (2**64 - 1, 5, 5, 2**64 - 1),
        # 16 events on a processor with six counters: each counted a part of the time (Linux 6.1 on AArch64).
        (84_469_206, 484_934_256, 170_106_128, None),
        (0, 1, 0, None),
    ],
)
def test_a_counter_that_was_not_counting_all_the_time_has_no_value(
    value: int, enabled: int, running: int, expected: int | None
) -> None:
    reader, writer = os.pipe()
    try:
        os.write(writer, struct.pack("=QQQ", value, enabled, running))
        assert read_counter(reader) == expected
    finally:
        os.close(reader)
        os.close(writer)
