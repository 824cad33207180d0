"""
Profiles as Perfetto traces. Each record with a stack is a sample (PerfSample), on its thread's track at its time.

The messages are those of protos/perfetto/trace/perfetto_trace.proto. Function names, frames and stacks are interned:
written once, before the samples that refer to them by number::

    TracePacket   2 process_tree (ProcessTree: 1 Process (1 pid, 3 cmdline), 2 Thread (1 tid, 3 tgid, 2 name))
                  8 timestamp | 10 sequence | 12 interned_data | 13 sequence_flags | 58 clock | 59 defaults | 66 sample
    InternedData  5 function_names, 17 mapping_paths (1 iid, 2 str) | 6 frames (1 iid, 2 function, 3 mapping)
                  7 callstacks (1 iid, 2 frame iids, the outermost first) | 19 mappings (1 iid, 7 path iids)
    PerfSample    1 cpu | 2 pid | 3 tid | 4 callstack | 5 cpu_mode | 6 timebase_count
    defaults      12 perf_sample_defaults (1 timebase (1 period, 4 counter, 10 name, 11 clock))
"""

from __future__ import annotations

import gzip
import html
import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import FormatError
from dprobes.sinks.perfetto.perfetto_messages import Packets, length_field, text_field, varint, varint_field
from dprobes.sinks.stacks.stack_profile import StackProfile, tree_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.sinks.stacks.stack_profile import FrameNode, StackSample

__all__ = ["flame_graph", "folded_lines", "parse_folded", "perfetto_samples", "pprof_of"]

# Folded stacks, the format of flame graph tools: a line for each stack. Writing and parsing.
#
# ::
#
#     python3;main;PyRun_SimpleString 42

_LINE = re.compile(r"(?P<stack>.*\S) +(?P<weight>\d{1,19})")


def folded_lines(profile: StackProfile) -> list[str]:
    """Return the lines of a profile, sorted by stack; a semicolon within a name becomes a colon."""
    return [
        f"{';'.join(name.replace(';', ':').replace(chr(10), ' ') for name in stack)} {weight}"
        for stack, weight in sorted(profile.weights.items())
    ]


def parse_folded(lines: Iterable[str], name: str) -> StackProfile:
    """Return the profile in the lines of the file ``name``; raise ``FormatError`` for an invalid line."""
    weights: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise FormatError(
                f"'{name}' holds no folded stacks: line {number} does not end with a blank and a number",
                hint="a line is 'main;outer;inner 42'",
            )
        stack = tuple(match["stack"].split(";"))
        weights[stack] = weights.get(stack, 0) + int(match["weight"])
    return StackProfile(weights, title=name)


# Flame graphs: one self-contained HTML file with zoom, search, and comparison of two profiles.

_PAGE = Path(__file__).with_name("flamegraph.html")
_LEAST = 1 / 4000
"""Minimum share of all weight for a frame to be included: smaller ones would be less than half a pixel wide."""


def flame_graph(profile: StackProfile, baseline: StackProfile | None = None) -> str:
    """Return the page of a profile; with a ``baseline``, frames are coloured by their gain or loss."""
    root = tree_of(profile, baseline)
    least = max(root.weight, root.before) * _LEAST
    data = {
        "title": profile.title,
        "unit": profile.unit,
        "baseline": None if baseline is None else baseline.title or "before",
        "rows": list(_rows(root, least)),
    }
    # A name must not be able to end the script element.
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
    page = _PAGE.read_text(encoding="utf-8")
    return page.replace("{{title}}", html.escape(profile.title or "Flame graph")).replace("{{data}}", text)


def _rows(root: FrameNode, least: float) -> Iterator[tuple[int, str, int, int]]:
    """
    Iterate over the frames, callers before callees: depth, name, weight and weight in the baseline of each.

    Frames with a weight below ``least`` are omitted. The iteration is not recursive, because stacks may be deep.
    """
    waiting = [(0, root)]
    while waiting:
        depth, node = waiting.pop()
        yield depth, node.name, node.weight, node.before
        callees = (each for each in node.sorted_callees() if max(each.weight, each.before) >= least)
        waiting += [(depth + 1, each) for each in reversed(list(callees))]


# Profiles for pprof: a gzipped protobuf message (github.com/google/pprof, proto/profile.proto).
#
# ::
#
#     Profile    1 sample_type (ValueType: 1 type, 2 unit) | 2 sample (Sample: 1 location ids, 2 values)
#                | 4 location (Location: 1 id, 4 line (Line: 1 function id)) | 5 function (Function: 1 id, 2 name)
#                | 6 string_table, whose first entry is empty


class _Strings:
    """The string table of a profile; other messages refer to strings by their indices."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {"": 0}

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def pprof_of(profile: StackProfile) -> bytes:
    """Return the bytes of a profile; a function has one location, because line numbers are not recorded."""
    strings = _Strings()
    kind = varint_field(1, strings.number(profile.unit)) + varint_field(2, strings.number(_unit(profile.unit)))
    message = length_field(1, kind)
    locations: dict[str, int] = {}
    for stack, weight in sorted(profile.weights.items()):
        ids = b"".join(varint(locations.setdefault(name, len(locations) + 1)) for name in reversed(stack))
        message += length_field(2, length_field(1, ids) + length_field(2, varint(weight)))
    for name, number in locations.items():
        message += length_field(4, varint_field(1, number) + length_field(4, varint_field(1, number)))
        message += length_field(5, varint_field(1, number) + varint_field(2, strings.number(name)))
    message += b"".join(text_field(6, text) for text in strings.numbers)
    return gzip.compress(message, mtime=0)


def _unit(what: str) -> str:
    return what if what in ("bytes", "nanoseconds") else "count"


_PACKET = 1
_MONOTONIC = 3
"""The clock of times: the number of CLOCK_MONOTONIC in BuiltinClock."""

_SEQUENCE = 1
_NEEDS_STATE, _STATE_CLEARED = 2, 1
_SW_CPU_CLOCK, _PERF_CLOCK_MONOTONIC = 1, 2
_KERNEL_MODE, _USER_MODE = 1, 2
_KERNEL = "_[k]"
"""Suffix of the names of kernel functions."""

_INTERNED_MAX = 1 << 12
"""Maximum number of stacks in one packet."""


def perfetto_samples(samples: Sequence[StackSample], title: str, unit: str, wall_offset: int) -> bytes:
    """
    Return the bytes of a Perfetto trace with one PerfSample for each sample.

    ``unit`` is that of the samples' weights. ``wall_offset`` converts their times into nanoseconds since 1970.
    """
    return b"".join(_packets(samples, title, unit, wall_offset))


def _packets(samples: Sequence[StackSample], title: str, unit: str, wall_offset: int) -> Iterator[bytes]:
    end = max((sample.time for sample in samples), default=0)
    asleep = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    yield Packets(_SEQUENCE).clocks(end, max(end + wall_offset, 0), end + max(asleep, 0), is_first=True)
    yield _packet(length_field(2, _tree(samples)))
    timebase = varint_field(1, 1) + varint_field(4, _SW_CPU_CLOCK) + text_field(10, unit)
    timebase += varint_field(11, _PERF_CLOCK_MONOTONIC)
    defaults = varint_field(58, _MONOTONIC) + length_field(12, length_field(1, timebase))
    yield _packet(length_field(59, defaults) + varint_field(13, _STATE_CLEARED))
    interned = _Interned(title)
    ordered = sorted(samples, key=lambda sample: sample.time)
    for first in range(0, len(ordered), _INTERNED_MAX):
        part = ordered[first : first + _INTERNED_MAX]
        numbers = [interned.number(sample.stack) for sample in part]
        if said := interned.take():
            yield _packet(length_field(12, said) + varint_field(13, _NEEDS_STATE))
        for sample, number in zip(part, numbers, strict=True):
            yield _packet(_sample(sample, number))


def _packet(content: bytes) -> bytes:
    return length_field(_PACKET, content + varint_field(10, _SEQUENCE))


def _tree(samples: Sequence[StackSample]) -> bytes:
    """Return the processes and threads of samples, with the names from the records."""
    processes = {sample.pid: sample.name for sample in samples}
    threads = {sample.tid: sample for sample in samples}
    found = b"".join(
        length_field(1, varint_field(1, pid) + text_field(3, name)) for pid, name in sorted(processes.items())
    )
    return found + b"".join(
        length_field(2, varint_field(1, tid) + text_field(2, each.name) + varint_field(3, each.pid))
        for tid, each in sorted(threads.items())
    )


def _sample(sample: StackSample, number: int) -> bytes:
    is_kernel = bool(sample.stack) and sample.stack[-1].endswith(_KERNEL)
    said = varint_field(2, sample.pid) + varint_field(3, sample.tid) + varint_field(4, number)
    said += varint_field(5, _KERNEL_MODE if is_kernel else _USER_MODE) + varint_field(6, sample.weight)
    if sample.cpu is not None:
        said = varint_field(1, sample.cpu) + said
    return (
        varint_field(8, sample.time)
        + length_field(66, said)
        + varint_field(58, _MONOTONIC)
        + (varint_field(13, _NEEDS_STATE))
    )


class _Interned:
    """Numbers of interned stacks, frames and names, and the encoding of new ones."""

    def __init__(self, title: str) -> None:
        self._stacks: dict[tuple[str, ...], int] = {}
        self._frames: dict[str, int] = {}
        self._parts: list[bytes] = []
        for number, path in ((1, title), (2, "kernel")):
            self._parts.append(length_field(17, varint_field(1, number) + length_field(2, path.encode())))
            self._parts.append(length_field(19, varint_field(1, number) + varint_field(7, number)))

    def number(self, stack: tuple[str, ...]) -> int:
        """Return the interning number (iid) of a call stack; a new stack is added to the interned data."""
        known = self._stacks.get(stack)
        if known is None:
            known = self._stacks[stack] = len(self._stacks) + 1
            frames = b"".join(varint_field(2, self._frame(name)) for name in stack)
            self._parts.append(length_field(7, varint_field(1, known) + frames))
        return known

    def _frame(self, name: str) -> int:
        known = self._frames.get(name)
        if known is None:
            known = self._frames[name] = len(self._frames) + 1
            function = name.removesuffix(_KERNEL)
            data = function.encode("utf-8", "backslashreplace")
            self._parts.append(length_field(5, varint_field(1, known) + length_field(2, data)))
            mapping = 2 if function != name else 1
            frame = varint_field(1, known) + varint_field(2, known) + varint_field(3, mapping)
            self._parts.append(length_field(6, frame))
        return known

    def take(self) -> bytes:
        """Return the encoded entries that are new since the last call."""
        parts, self._parts = self._parts, []
        return b"".join(parts)
