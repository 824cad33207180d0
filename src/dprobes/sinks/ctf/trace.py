"""
One trace: a directory with its metadata and its streams.

Times never decrease in a stream, which readers insist on, but records come in an order of their own: those of several
programs, and those of one where a handler was held up. So there is a stream for each CPU, and another one whenever a
batch begins before what all streams of its CPU have already. No time is changed, and nothing is held back.

The metadata are written before the packets that need them, to another file that takes the place of the old one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import shutil
import uuid
from datetime import UTC, datetime
from operator import itemgetter
from typing import TYPE_CHECKING

from dprobes.record.boot import BOOT_ID
from dprobes.sinks.ctf.classes import EventClass
from dprobes.sinks.ctf.metadata import STREAM_CLASS, STREAM_CLASS_WITHOUT_CPU, Metadata
from dprobes.sinks.ctf.packets import Stream

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dprobes.record.origin import RecordSource
    from dprobes.sinks.ctf.classes import HeaderItems
    from dprobes.sinks.typedvalues import Shape

__all__ = ["Events", "Trace"]

Events = list[tuple[int, bytes]]
"""Events with their times."""

_TIME = itemgetter(0)


class Trace:
    """Make a trace in a directory, and write to it. All methods raise ``OSError``."""

    def __init__(self, directory: Path, wall_offset: int) -> None:
        self.wall_offset = wall_offset
        self._directory = _new_directory(directory)
        self._uuid = uuid.uuid4()
        self._metadata = Metadata(self._uuid, _clock_uuid(), wall_offset, platform.node())
        self._is_described = False
        """Whether the metadata on disk say everything."""
        self._classes: dict[str, EventClass] = {}
        """By their content."""
        self._streams: dict[int | None, list[Stream]] = {}
        self._numbers = itertools.count()

    def describe(self, source: RecordSource) -> None:
        """Say of a program what it is; it stays said when that has gone."""
        if self._metadata.add_program(source):
            self._is_described = False

    def add_class(self, name: str, header: HeaderItems, shape: Shape, *, has_cpu: bool) -> EventClass:
        """Return the class of events that are on a CPU or not; that of a program that comes again is there already."""
        number = len(self._metadata.classes)
        stream_class = STREAM_CLASS if has_cpu else STREAM_CLASS_WITHOUT_CPU
        event_class = EventClass(number, stream_class, name, header, shape)
        known = self._classes.setdefault(event_class.content, event_class)
        if known is event_class:
            self._metadata.classes.append(event_class.text)
            self._is_described = False
        return known

    def write(self, events: Mapping[int | None, Events], lost: int) -> None:
        """Write events by their CPUs, before which ``lost`` others were lost: all, or none if that fails."""
        if not self._is_described:
            self._write_metadata()
        staged: list[Stream] = []
        new: list[Stream] = []
        for cpu, found in events.items():
            found.sort(key=_TIME)
            streams = self._streams.get(cpu, ())
            fitting = [stream for stream in streams if stream.last_time <= found[0][0]]
            if fitting:
                stream = max(fitting, key=lambda stream: stream.last_time)
            else:
                stream = Stream(self._directory, self._uuid, self._numbers, cpu)
                new.append(stream)
            stream.stage(found, 0 if staged else lost)
            staged.append(stream)
        _commit(staged)
        for stream in new:
            self._streams.setdefault(stream.cpu, []).append(stream)

    def remove_if_empty(self) -> None:
        """Delete the trace if nothing could be written to it."""
        if not self._streams:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _write_metadata(self) -> None:
        path = self._directory / ".metadata"
        try:
            path.write_text(self._metadata.text(), encoding="utf-8", errors="backslashreplace")
            path.rename(self._directory / "metadata")
        except OSError:
            path.unlink(missing_ok=True)
            raise
        self._is_described = True


def _commit(streams: list[Stream]) -> None:
    done: list[Stream] = []
    try:
        for stream in streams:
            stream.commit()
            done.append(stream)
    except OSError:
        for stream in done:
            with contextlib.suppress(OSError):
                stream.undo()
        raise


def _new_directory(parent: Path) -> Path:
    """Make a directory with the time in its name."""
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def _clock_uuid() -> uuid.UUID:
    """Return what identifies CLOCK_MONOTONIC, which begins anew with the machine."""
    try:
        return uuid.UUID(os.fsdecode(BOOT_ID.read_bytes()).strip())
    except (OSError, ValueError):
        return uuid.uuid4()
