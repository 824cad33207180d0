"""Records of a program that finds probepoints while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dprobes.arch import architecture
from dprobes.diagnostics import Diagnostics
from dprobes.manager.recorder import ProgramRecords
from dprobes.record.record_origin import RecordSource
from dprobes.resolve.local_module import resolve_everywhere
from dprobes.rpn.compilation_passes import parse_source
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.formatters.recorded_names import RecordedNames
    from dprobes.record.record_origin import Place

SOURCE = RecordSource(1, "watching", "vmlinux")
TEXT = "name = vmlinux\nmodtype = kernel\n" + "".join(f"address = {n}000\nwatchpoint = w\nexit\n" for n in (1, 2, 3))


class FakeRecording:
    """Keep the names of what is announced, and those of the places when records are written."""

    def __init__(self) -> None:
        self.announced: list[list[str]] = []
        self.written: list[list[str]] = []

    def announce(self, source: RecordSource, places: Sequence[Place]) -> None:
        assert source == SOURCE
        self.announced.append([place.symbol for place in places])

    def write(
        self, source: RecordSource, records: list[tuple[int, bytes]], places: Sequence[Place], names: RecordedNames
    ) -> bool:
        assert records
        assert names.located([record for _, record in records], [places[probe] for probe, _ in records]) == []
        self.written.append([place.symbol for place in places])
        return True


def test_each_probepoint_is_announced_before_records_of_it_are_written() -> None:
    program = parse_source(SourceFile("x.rpn", TEXT), Diagnostics())
    probes = resolve_everywhere(program, architecture("x86_64"), Diagnostics())
    names = [probe.where for probe in probes]
    recording: Any = FakeRecording()
    records = ProgramRecords(recording, SOURCE)
    for count in (1, 1, 3):
        assert records.write(probes[:count], [(count - 1, b"record")])
    assert recording.announced == [names[:1], names[1:]]
    assert recording.written == [names[:1], names[:1], names]
