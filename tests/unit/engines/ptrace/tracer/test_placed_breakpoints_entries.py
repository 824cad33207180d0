"""The entries of calls: which return has which, and that of too many the oldest are forgotten."""

from __future__ import annotations

from dprobes.engines.ptrace.tracer.placed_breakpoints import ENTRIES_MAX, Entries, Entry
from support.ptrace_programs import inserted_program, probe_of


def test_a_return_has_the_last_entry_with_its_frame() -> None:
    entries, (one, other) = Entries(), (probe_of(inserted_program(), n) for n in (1, 2))
    for probe, process, frame, time in ((one, 7, 0x1000, 1), (one, 7, 0x2000, 2), (other, 7, 0x1000, 3)):
        entries.enter(process, probe, frame, Entry(time, {5: time}))
    entries.enter(7, one, 0x1000, Entry(4, {}))  # the first call was left without a return
    assert entries.take(8, one, 0x1000) is None
    assert entries.take(7, one, 0x1000) == Entry(4, {})
    assert entries.take(7, one, 0x1000) is None
    assert entries.take(7, other, 0x1000) == Entry(3, {5: 3})
    entries.drop(one)
    assert entries.take(7, one, 0x2000) is None


def test_of_too_many_entries_the_oldest_are_forgotten() -> None:
    entries, probe = Entries(), probe_of(inserted_program())
    for frame in range(ENTRIES_MAX):
        entries.enter(1, probe, frame, Entry(frame, {}))
    entries.enter(1, probe, 0, Entry(-1, {}))  # which makes it the newest
    entries.enter(1, probe, ENTRIES_MAX, Entry(-2, {}))
    assert entries.take(1, probe, 1) is None
    assert entries.take(1, probe, 0) == Entry(-1, {})
    assert entries.take(1, probe, ENTRIES_MAX - 1) == Entry(ENTRIES_MAX - 1, {})


def test_all_calls_of_a_probepoint_can_be_taken() -> None:
    entries, (one, other) = Entries(), (probe_of(inserted_program(), n) for n in (1, 2))
    for probe, frame in ((one, 0x1000), (other, 0x1000), (one, 0x2000)):
        entries.enter(7, probe, frame, Entry(frame, {}))
    assert entries.take_all(one) == [(0x1000, Entry(0x1000, {})), (0x2000, Entry(0x2000, {}))]
    assert entries.take_all(one) == []
    assert entries.take(7, other, 0x1000) == Entry(0x1000, {})
