"""
The metadata of a trace: what its files hold, as text in TSDL (CTF 1.8.3, section 7).

It says in TSDL what ``packets.HEADER``, ``packets.CONTEXT`` and ``classes.EVENT_HEADER`` pack.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass
from dprobes.sinks.ctf.classes import TYPES, quoted
from dprobes.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable
    from uuid import UUID

    from dprobes.record.origin import RecordSource

__all__ = ["STREAM_CLASS", "STREAM_CLASS_WITHOUT_CPU", "Metadata"]

STREAM_CLASS = 0
STREAM_CLASS_WITHOUT_CPU = 1
"""For records that do not say on which CPU they were made."""

_NANOSECONDS = 1_000_000_000


@dataclass(slots=True)
class Metadata:
    """
    Hold what is said of a trace.

    ``wall_offset`` is the clock's: what is added to a time to get nanoseconds since 1970. ``clock`` identifies the
    clock, which is the same for all that was running since the machine was started.
    """

    trace: UUID
    clock: UUID
    wall_offset: int
    hostname: str
    programs: list[RecordSource] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)

    def add_program(self, source: RecordSource) -> bool:
        """Note what is to be said of a program; return whether that was not known."""
        for index, known in enumerate(self.programs):
            if (known.name, known.module) == (source.name, source.module):
                self.programs[index] = source
                return known.build_ids != source.build_ids
        self.programs.append(source)
        return True

    def text(self) -> str:
        """Return the text of the file."""
        return "\n".join([
            "/* CTF 1.8 */\n",
            TYPES,
            _TRACE.replace("UUID", str(self.trace)),
            self._environment(),
            self._clock(),
            _STREAMS,
            *self.classes,
        ])  # fmt: skip

    def _environment(self) -> str:
        lines = [
            f"hostname = {quoted(self.hostname)};",
            'domain = "dprobes";',
            'tracer_name = "dprobes";',
            f"tracer_version = {quoted(__version__)};",
        ]
        for number, source in enumerate(self.programs, 1):
            lines.append(f"program_{number} = {quoted(source.name)};")
            lines.append(f"program_{number}_module = {quoted(source.module)};")
            if source.build_ids:
                lines.append(f"program_{number}_build_ids = {quoted(' '.join(source.build_ids))};")
        return _block("env", lines)

    def _clock(self) -> str:
        seconds, nanoseconds = divmod(self.wall_offset, _NANOSECONDS)
        return _block("clock", [
            "name = monotonic;",
            f'uuid = "{self.clock}";',
            'description = "CLOCK_MONOTONIC";',
            f"freq = {_NANOSECONDS};",
            f"offset_s = {seconds};",
            f"offset = {nanoseconds};",
            "absolute = TRUE;",
        ]) + _TIME  # fmt: skip


def _block(name: str, lines: Iterable[str]) -> str:
    return f"{name} {{\n" + "".join(f"\t{line}\n" for line in lines) + "};\n"


_TRACE = """\
trace {
	major = 1;
	minor = 8;
	uuid = "UUID";
	byte_order = le;
	packet.header := struct {
		uint32_t magic;
		uint8_t uuid[16];
		uint32_t stream_id;
		uint64_t stream_instance_id;
	};
};
"""

_TIME = "typealias integer { size = 64; align = 8; signed = false; map = clock.monotonic.value; } := monotonic_t;\n"

_STREAM = """\
stream {
	id = ID;
	packet.context := struct {
		uint64_t packet_size;
		uint64_t content_size;
		monotonic_t timestamp_begin;
		monotonic_t timestamp_end;
		uint64_t events_discarded;
CPU	};
	event.header := struct {
		uint32_t id;
		monotonic_t timestamp;
	};
};
"""

_STREAMS = "\n".join((
    _STREAM.replace("ID", str(STREAM_CLASS)).replace("CPU", "\t\tuint32_t cpu_id;\n"),
    _STREAM.replace("ID", str(STREAM_CLASS_WITHOUT_CPU)).replace("CPU", ""),
))  # fmt: skip
