"""Samples as a Perfetto trace, read with Perfetto's own messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.sinks.stacks import profile_formats as module
from dprobes.sinks.stacks.profile_formats import perfetto_samples
from dprobes.sinks.stacks.stack_profile import StackSample
from support.perfetto_messages import Sample, packets_of, read_samples

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

SAMPLES = [
    StackSample(30, None, 7, 9, "b", ("main", "read", "ksys_read_[k]"), 5),
    StackSample(10, 1, 7, 7, "a", ("main",), 1),
    StackSample(20, 0, 8, 8, "\udcff", ("main", "read"), 2**40),
]


def test_samples_are_in_the_order_of_time_with_their_stacks(tmp_path: Path) -> None:
    path = tmp_path / "t.pftrace"
    path.write_bytes(perfetto_samples(SAMPLES, "app", "bytes", 1000))
    threads, found = read_samples(path)
    assert found == [
        Sample(10, 1, 7, 7, ["main"], 1),
        Sample(20, 0, 8, 8, ["main", "read"], 2**40),
        Sample(30, 0, 7, 9, ["main", "read", "ksys_read"], 5),
    ]
    assert threads == {7: "a", 8: "\\udcff", 9: "b"}
    packets = packets_of(path)
    assert [clock.timestamp for clock in packets[0].clock_snapshot.clocks][:2] == [30, 1030]
    (interned,) = (packet.interned_data for packet in packets if packet.HasField("interned_data"))
    assert [path.str for path in interned.mapping_paths] == [b"app", b"kernel"]
    assert [frame.mapping_id for frame in interned.frames] == [1, 1, 2]
    (defaults,) = (packet.trace_packet_defaults for packet in packets if packet.HasField("trace_packet_defaults"))
    assert defaults.perf_sample_defaults.timebase.name == "bytes"


def test_what_is_interned_comes_before_the_samples_that_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_INTERNED_MAX", 2)
    path = tmp_path / "t.pftrace"
    samples = [StackSample(n, 0, 1, 1, "a", ("main", f"f{n // 3}"), 1) for n in range(10)]
    path.write_bytes(perfetto_samples(samples, "app", "samples", 0))
    _, found = read_samples(path)
    assert [sample.stack for sample in found] == [["main", f"f{n // 3}"] for n in range(10)]
    assert sum(packet.HasField("interned_data") for packet in packets_of(path)) == 4


def test_a_trace_without_samples_is_one(tmp_path: Path) -> None:
    path = tmp_path / "t.pftrace"
    path.write_bytes(perfetto_samples([], "app", "samples", 0))
    assert read_samples(path) == ({}, [])
