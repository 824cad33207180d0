"""What sinks have in common, and the names by which ``--log-target`` calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dprobes.errors import SinkError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SINK_NAMES", "Sink", "sink_opener"]

SINK_NAMES = {
    "KLOG": "the kernel's log",
    "COM1": "the first serial line",
    "COM2": "the second serial line",
    "file:PATH": "a file, appended to; a name with a slash needs no 'file:'",
}
"""What ``--log-target`` takes, for people."""

_LATER = {
    "LTT": "its successor's format is CTF",
    "EVL": "its successor is the systemd journal",
}


class Sink(Protocol):
    """Take the text of records."""

    def write(self, text: str) -> None:
        """Write records, without the last line end; raise ``SinkError`` if that fails."""

    def flush(self) -> None:
        """Make what was written visible; raises as ``write``."""

    def close(self) -> None:
        """Flush and give up; raises as ``write``."""


def sink_opener(name: str) -> Callable[[], Sink]:
    """Return what opens the sink of a log target; raise ``SinkError`` for a name that is none."""
    upper = name.upper()
    if upper == "KLOG":
        from dprobes.sinks.klog import KernelLogSink

        return KernelLogSink
    if upper in ("COM1", "COM2"):
        from dprobes.sinks.serial import SerialSink

        device = f"/dev/ttyS{int(upper[-1]) - 1}"
        return lambda: SerialSink(device)
    if name.startswith("file:") or "/" in name:
        from pathlib import Path

        from dprobes.sinks import stream

        path = Path(name.removeprefix("file:"))
        if not path.is_absolute():
            raise SinkError(f"log target '{name}': the path of a file must be absolute")
        return lambda: stream.file(path, append=True)
    if upper in _LATER:
        raise SinkError(f"log target {upper} is not there: {_LATER[upper]}", hint=_hint())
    raise SinkError(f"there is no log target '{name}'", hint=_hint())


def _hint() -> str:
    return "log targets are " + ", ".join(SINK_NAMES)
