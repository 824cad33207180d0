"""Log targets by name: one row for each kind that comes with DProbes, and the installed plug-ins."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dprobes.errors import SinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from importlib.metadata import EntryPoint

    from dprobes.sinks import Sink, SinkOptions

__all__ = ["ALIASES", "KINDS", "LogTargetName", "SinkKind", "compression_of", "is_trace_name", "kinds", "parse_target"]

# The names of trace files, from which writers choose format and compression. Readers ignore them.


def is_trace_name(name: str) -> bool:
    """Return whether a file name ends as the names of trace files do."""
    return name.endswith((".dpt", ".dptz"))


def compression_of(name: str) -> Literal["zstd"] | None:
    """Return the compression of a trace file of this name, or None if it is not compressed."""
    return "zstd" if name.endswith(".dptz") else None


PLUGINS = "dprobes.sinks"
"""The group of entry points; each is called like the functions ``open`` of the sinks of DProbes."""


_METHODS = ("create_event", "log_events", "destroy_event", "flush", "close")
"""The required methods of a sink."""


class SinkKind(NamedTuple):
    """
    A kind of log target.

    ``syntax`` is its written form, ``module`` the module with its function ``open``. ``takes_path`` is true if the
    argument is a path. ``has_structure`` is true if it accepts structured records, and needs all items of their header.
    """

    name: str
    syntax: str
    doc: str
    module: str
    takes_path: bool = False
    has_structure: bool = False

    @property
    def is_plug_in(self) -> bool:
        """True if it is from another package."""
        return ":" in self.module


KINDS = (
    SinkKind("console", "console", "standard output (run)", "dprobes.sinks.local.console_target"),
    SinkKind("file", "file:PATH", "a file, appended to; a trace file if its name ends in .dpt, or .dptz (compressed); "
             "a name with a slash needs no 'file:'", "dprobes.sinks.local.file_target", takes_path=True),
    SinkKind("klog", "KLOG", "the kernel's log", "dprobes.sinks.local.klog_target"),
    SinkKind("syslog", "syslog[:unix|udp|tcp|tls://…]", "syslog (RFC 5424): syslog is /dev/log; syslog:unix:///PATH, "
             "syslog:udp://HOST, syslog:tcp://HOST, syslog:tls://HOST?ca=FILE", "dprobes.sinks.syslog.syslog_target",
             has_structure=True),
    SinkKind("journal", "journal[:SOCKET]", "the systemd journal, with fields for items and templates",
             "dprobes.sinks.local.journal_target", takes_path=True, has_structure=True),
    SinkKind("serial", "serial:DEVICE[@BAUD]", "a serial line; COM1 and COM2 are the first two",
             "dprobes.sinks.local.serial_target", takes_path=True),
    SinkKind("command", "command:CMD ARGS", "the standard input of a command, which is started without a shell",
             "dprobes.sinks.local.command_target"),
    SinkKind("ctf", "ctf:DIR", "CTF traces in a directory, for babeltrace2 and Trace Compass; "
             "LTT is the directory 'ctf'",
             "dprobes.sinks.ctf.ctf_target", takes_path=True, has_structure=True),
    SinkKind("perfetto", "perfetto:FILE", "a Perfetto trace, for ui.perfetto.dev: the calls of each thread",
             "dprobes.sinks.perfetto.perfetto_target", takes_path=True, has_structure=True),
    SinkKind("parquet", "parquet:DIR", "Parquet files in a directory, one table for each major and minor code",
             "dprobes.tables.parquet_target", takes_path=True, has_structure=True),
    SinkKind("otlp", "otlp:http://HOST:4318", "an OpenTelemetry collector, over HTTP or HTTPS",
             "dprobes.sinks.otlp.otlp_target", has_structure=True),
)  # fmt: skip
"""The kinds that come with DProbes."""

ALIASES = {
    "KLOG": "klog:",
    "COM1": "serial:/dev/ttyS0",
    "COM2": "serial:/dev/ttyS1",
    "LTT": "ctf:",
    "EVL": "journal:",
}
"""The original's names, matched case-insensitively, with their equivalents."""


class LogTargetName(NamedTuple):
    """A parsed name of a log target; ``text`` is its canonical form."""

    kind: SinkKind
    argument: str

    @property
    def text(self) -> str:
        """The name, displayed and used as a key; the original's names are kept."""
        written = f"{self.kind.name}:{self.argument}"
        for alias, meaning in ALIASES.items():
            if written == meaning:
                return alias
        return written if self.argument else self.kind.name

    def absolute(self, directory: Path) -> LogTargetName:
        """Return the same target with its path, if it has one, made absolute from ``directory``."""
        if not self.kind.takes_path or not self.argument:
            return self
        return LogTargetName(self.kind, os.path.normpath(directory / self.argument))

    def open(self, options: SinkOptions) -> Sink:
        """Open the sink; raise ``SinkError`` if that fails."""
        if self.kind.takes_path and self.argument and not Path(self.argument).is_absolute():
            raise SinkError(f"log target '{self.text}': the path must be absolute")
        opener = _opener(self.kind)
        if not self.kind.is_plug_in:
            sink: Sink = opener(self.argument, options)
            return sink
        return _open_plug_in(self, opener, options)


def _opener(kind: SinkKind) -> Callable[[str, SinkOptions], Any]:
    """Import the function that opens sinks of a kind; errors of a plug-in become errors of the log target."""
    if not kind.is_plug_in:
        return importlib.import_module(kind.module).open  # type: ignore[no-any-return]
    entries = [entry for entry in _plug_ins() if entry.name == kind.name]
    if len(entries) != 1:
        packages = " and ".join(sorted(entry.dist.name if entry.dist else entry.value for entry in entries))
        raise SinkError(
            f"more than one plug-in has the log target '{kind.name}': those of {packages}", hint="uninstall one of them"
        )
    try:
        return entries[0].load()  # type: ignore[no-any-return]
    except Exception as error:
        raise SinkError(
            f"log target '{kind.name}': its plug-in {kind.module} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def _open_plug_in(name: LogTargetName, opener: Callable[[str, SinkOptions], Any], options: SinkOptions) -> Sink:
    """Open the sink of a plug-in with its function ``opener``; raise ``SinkError`` for any exception in it."""
    try:
        sink = opener(name.argument, options)
    except SinkError:
        raise
    except (Exception, SystemExit) as error:
        raise SinkError(f"log target '{name.text}': its plug-in failed: {type(error).__name__}: {error}") from error
    missing = [method for method in _METHODS if not callable(getattr(sink, method, None))]
    if missing:
        raise SinkError(
            f"log target '{name.text}': its plug-in returned no sink but {type(sink).__name__}, "
            f"which lacks {', '.join(missing)}"
        )
    return sink  # type: ignore[no-any-return]


def _plug_ins() -> Iterator[EntryPoint]:
    from importlib.metadata import entry_points  # the import takes 10 ms, and plug-ins are rare

    yield from entry_points(group=PLUGINS)


def kinds() -> Iterator[SinkKind]:
    """Iterate over all kinds of log targets. A plug-in cannot replace a kind that comes with DProbes."""
    yield from KINDS
    known = {kind.name for kind in KINDS}
    for entry in _plug_ins():
        if entry.name not in known:
            known.add(entry.name)
            yield SinkKind(entry.name, f"{entry.name}:…", "a plug-in", entry.value, has_structure=True)


def parse_target(text: str) -> LogTargetName:
    """Return the parsed name of a log target; raise ``SinkError`` if it is invalid."""
    if "\0" in text:  # neither paths nor command arguments can contain it
        raise SinkError(f"there is no log target {text!r}")
    meaning = ALIASES.get(text.upper(), text)
    name, colon, argument = meaning.partition(":")
    if "/" in name or (not colon and is_trace_name(meaning)):
        name, argument = "file", meaning
    for kind in kinds():
        if kind.name == name.lower():
            return LogTargetName(kind, argument)
    from dprobes.diagnostics import did_you_mean

    hint = did_you_mean(name.lower(), [kind.name for kind in kinds()])
    hint = hint or "'dprobes log-target kinds' lists them"
    raise SinkError(f"there is no log target '{text}'", hint=hint)
