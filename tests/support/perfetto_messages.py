"""Reading of Perfetto traces with the messages of the package ``perfetto``, which is independent of dprobes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

if TYPE_CHECKING:
    from pathlib import Path

MONOTONIC = 3


@dataclass
class Event:
    """A slice or an instant event; ``end`` is None for a slice without an end."""

    name: str
    track: str
    begin: int
    depth: int
    is_slice: bool
    arguments: dict[str, Any]
    end: int | None = None
    returned: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trace:
    """The contents of a trace; ``events`` are in the order of their begin."""

    events: list[Event]
    tracks: dict[str, dict[str, Any]]
    clocks: list[dict[int, int]]
    losses: int

    def on(self, track: str) -> list[Event]:
        return [event for event in self.events if event.track == track]


def packets_of(path: Path) -> list[Any]:
    """Return the packets of a file; fail at a field that the package does not know."""
    trace = protos.Trace()
    data = path.read_bytes()
    assert trace.ParseFromString(data) == len(data)
    trace.DiscardUnknownFields()
    assert trace.ByteSize() == len(data)
    return list(trace.packet)


def read_perfetto(path: Path) -> Trace:
    """Return the events of a trace as a viewer makes them: in order of time, slices nested on their tracks."""
    packets = packets_of(path)
    names: dict[int, str] = {}
    tracks: dict[str, dict[str, Any]] = {}
    clocks, losses = [], 0
    for packet in packets:
        if packet.HasField("track_descriptor"):
            names[packet.track_descriptor.uuid] = _describe(packet.track_descriptor, names, tracks)
        if packet.HasField("clock_snapshot"):
            assert packet.clock_snapshot.primary_trace_clock == MONOTONIC
            clocks.append({clock.clock_id: clock.timestamp for clock in packet.clock_snapshot.clocks})
        losses += packet.previous_packet_dropped
    events: list[Event] = []
    stacks: dict[str, list[Event]] = {}
    with_events = [packet for packet in packets if packet.HasField("track_event")]
    for packet in sorted(with_events, key=lambda packet: packet.timestamp):
        assert packet.timestamp_clock_id == MONOTONIC
        assert packet.trusted_packet_sequence_id
        _add(packet, names[packet.track_event.track_uuid], events, stacks)
    return Trace(events, tracks, clocks, losses)


def _describe(descriptor: Any, names: dict[int, str], tracks: dict[str, dict[str, Any]]) -> str:
    if descriptor.HasField("thread"):
        thread = descriptor.thread
        name = f"thread {thread.pid} {thread.tid}"
        tracks[name] = {"name": thread.thread_name, "parent": names[descriptor.parent_uuid]}
    elif descriptor.HasField("process"):
        name = f"process {descriptor.process.pid}"
        tracks[name] = {"name": descriptor.process.process_name}
    else:
        name = descriptor.name
        tracks[name] = {}
    return name


def _add(packet: Any, track: str, events: list[Event], stacks: dict[str, list[Event]]) -> None:
    event, stack = packet.track_event, stacks.setdefault(track, [])
    arguments = {annotation.name: _value(annotation) for annotation in event.debug_annotations}
    assert len(arguments) == len(event.debug_annotations)
    if event.type == protos.TrackEvent.TYPE_SLICE_END:
        ended = stack.pop()  # there must be one
        ended.end, ended.returned = packet.timestamp, arguments
        return
    is_slice = event.type == protos.TrackEvent.TYPE_SLICE_BEGIN
    assert is_slice or event.type == protos.TrackEvent.TYPE_INSTANT
    (category,) = event.categories
    new = Event(f"{category}:{event.name}", track, packet.timestamp, len(stack), is_slice, arguments)
    events.append(new)
    if is_slice:
        stack.append(new)


def _value(annotation: Any) -> Any:
    if annotation.dict_entries:
        return {entry.name: _value(entry) for entry in annotation.dict_entries}
    which = annotation.WhichOneof("value")
    if which is None:
        return [_value(entry) for entry in annotation.array_values]
    return (which.removesuffix("_value"), getattr(annotation, which))


@dataclass(frozen=True)
class Sample:
    """A sample of a profile; its stack has the outermost function first."""

    time: int
    cpu: int
    pid: int
    tid: int
    stack: list[str]
    weight: int


def read_samples(path: Path) -> tuple[dict[int, str], list[Sample]]:
    """Return the names of threads and the samples of a trace; fail if a sample refers to data not interned before."""
    functions: dict[int, str] = {}
    frames: dict[int, str] = {}
    stacks: dict[int, list[str]] = {}
    paths: dict[int, str] = {}
    mappings: set[int] = set()
    threads: dict[int, str] = {}
    processes: set[int] = set()
    samples = []
    clock = 0
    for packet in packets_of(path):
        for process in packet.process_tree.processes:
            processes.add(process.pid)
        for thread in packet.process_tree.threads:
            assert thread.tgid in processes
            threads[thread.tid] = thread.name
        if packet.HasField("trace_packet_defaults"):
            assert packet.sequence_flags & protos.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
            clock = packet.trace_packet_defaults.timestamp_clock_id
            assert packet.trace_packet_defaults.perf_sample_defaults.timebase.period == 1
        interned = packet.interned_data
        functions |= {each.iid: each.str.decode() for each in interned.function_names}
        paths |= {each.iid: each.str.decode() for each in interned.mapping_paths}
        for mapping in interned.mappings:
            assert all(number in paths for number in mapping.path_string_ids)
            mappings.add(mapping.iid)
        for frame in interned.frames:
            assert frame.mapping_id in mappings
            frames[frame.iid] = functions[frame.function_name_id]
        stacks |= {each.iid: [frames[number] for number in each.frame_ids] for each in interned.callstacks}
        if packet.HasField("perf_sample"):
            said = packet.perf_sample
            assert packet.sequence_flags & protos.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
            assert (clock, packet.timestamp_clock_id, said.tid in threads) == (MONOTONIC, MONOTONIC, True)
            stack = stacks[said.callstack_iid]
            samples.append(Sample(packet.timestamp, said.cpu, said.pid, said.tid, stack, said.timebase_count))
    return threads, samples
