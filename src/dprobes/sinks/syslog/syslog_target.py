"""
Syslog messages: RFC 5424, and the older form that daemons expect at ``/dev/log`` (RFC 3164, as logger(1) writes it).

A message has one line, because receivers display line ends differently. So the lines of a record are joined by `` | ``.
The message has the contents of the record twice, as text and as structured data::

    <14>1 2026-11-22T04:30:00.123456Z host dprobes 4242 1.2
        [dprobes@32473 program="app" symbol="main" major="1" minor="2" pid="77"][fields@32473 fd="3"]
        04:30:00.123456  [77]  fd=3

MSGID is major.minor, PROCID the sending process. 32473 is the enterprise number that IANA reserves for documentation
(RFC 5612). A message longer than receivers must accept is truncated, with a note of the missing length.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from dprobes.errors import SinkError, reason_of
from dprobes.escapes import escaped, json_text
from dprobes.keyed.table_text import shown_rows
from dprobes.sinks.structured_records import DescribedRecords, lost_text, names_text, place_items, value_text
from dprobes.sinks.syslog.syslog_transports import Datagrams, Stream, Tls
from dprobes.sinks.text_sinks import refuse_binary

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.keyed.table_layout import Names, TableContents
    from dprobes.keyed.table_text import ShownRow
    from dprobes.record.record_origin import Place, RecordSource
    from dprobes.rpn.keyed_tables import Table
    from dprobes.sinks import Batch, Sink, SinkOptions
    from dprobes.sinks.structured_records import KnownRecord

__all__ = ["SyslogAddress", "SyslogFormatter", "SyslogSink"]

FORMS = ("5424", "3164")

_INFO = 1 * 8 + 6
_WARNING = 1 * 8 + 4
"""Facility 1, user-level messages, with severities 6 and 4."""

_APP = "dprobes"
_HEADER_ID = "dprobes@32473"
_FIELDS_ID = "fields@32473"

_NAME_MAX = 32
"""Maximum length of a name in structured data (RFC 5424, 6.3.3)."""

_HOST_MAX = 255

_QUOTED = str.maketrans({'"': '\\"', "\\": "\\\\", "]": "\\]"})

_SECOND = 1_000_000_000


class SyslogFormatter:
    """
    A converter of records to messages of at most ``limit`` bytes.

    With ``is_local``, messages of RFC 3164 have no host.
    """

    def __init__(self, format_name: str, form: str, limit: int, *, is_local: bool) -> None:
        self._records = DescribedRecords(format_name)
        self.create_event = self._records.create_event
        self._is_old = form == "3164"
        self._json = format_name == "json"
        self._limit = limit
        self._process = str(os.getpid())
        self._host = _host_name()
        self._old_host = "" if is_local else f"{self._host} "
        self._places: dict[tuple[str, Place], str] = {}
        self._second = -1
        self._second_text = ""

    def destroy_event(self, source: RecordSource) -> None:
        """Drop the description of a program after its last record."""
        self._records.destroy_event(source)
        self._places.clear()

    def messages(self, batch: Batch) -> list[bytes]:
        """Return a syslog message for each record of a batch, in the selected format (RFC 5424 or RFC 3164)."""
        return [self._message(batch, text, place, known) for text, place, _, known in self._records.of_batch(batch)]

    def lost_message(self, batch: Batch) -> bytes:
        """Return the message about records that were lost before a batch."""
        structured = _element(_HEADER_ID, [("program", batch.source.name), ("lost", str(batch.lost))])
        return self._put_together(_WARNING, time.time_ns(), "lost", structured, "", lost_text(batch))

    def table_messages(self, source: RecordSource, contents: Sequence[TableContents], names: Names) -> list[bytes]:
        """Return a syslog message for each row of keyed tables; ``names`` names addresses."""
        now = time.time_ns()
        return [
            self._table_message(source, each.table, row, now) for each in contents for row in shown_rows(each, names)
        ]

    def _table_message(self, source: RecordSource, table: Table, row: ShownRow, now: int) -> bytes:
        is_lost = "lost" in row.value
        items = [("program", source.name), ("table", table.name), ("kind", table.kind.value)]
        items += [("lost", str(row.value["lost"]))] if is_lost else []
        values = [(f"key{number}", key) for number, key in enumerate(row.keys)]
        values += [(name, str(value)) for name, value in row.value.items() if isinstance(value, int | float)]
        fields = "" if is_lost else _element(_FIELDS_ID, values)
        if self._json:
            head = {"table": table.name, "kind": table.kind.value, "keys": row.keys}
            text = json_text(head | row.value)
        else:
            text = row.line
        return self._put_together(
            _WARNING if is_lost else _INFO, now, "table", _element(_HEADER_ID, items), fields, text
        )

    def _message(self, batch: Batch, text: str, place: Place, known: KnownRecord | None) -> bytes:
        if known is None:
            return self._put_together(_INFO, time.time_ns(), "-", "-", "", text)
        record, items, fields, names, _ = known
        when = time.time_ns() if record.time is None else record.time + batch.wall_offset
        if self._is_old:
            return self._put_together(_INFO, when, "", "", "", text)
        named = [(field.name[:_NAME_MAX], value_text(field, value)) for field, value in fields]
        named += [(name[:_NAME_MAX], names_text(each)) for name, each in names]
        return self._put_together(
            _INFO,
            when,
            f"{record.major or 0}.{record.minor or 0}",
            f"[{_HEADER_ID}{self._place_text(batch.source, place)}{''.join(_parameters(items))}]",
            _element(_FIELDS_ID, ((name, value) for name, value in named if value is not None)),
            text,
        )

    def _place_text(self, source: RecordSource, place: Place) -> str:
        key = (source.name, place)
        if (text := self._places.get(key)) is None:
            text = self._places[key] = "".join(_parameters(place_items(source, place)))
        return text

    def _put_together(self, priority: int, when: int, kind: str, header: str, fields: str, text: str) -> bytes:
        text = escaped(" | ".join(line.strip() for line in text.split("\n")))
        if self._is_old:
            stamp = time.strftime("%b %e %H:%M:%S", time.localtime(when // _SECOND))
            return self._cut(f"<{priority}>{stamp} {self._old_host}{_APP}[{self._process}]: ", text)
        begin = f"<{priority}>1 {self._time(when)} {self._host} {_APP} {self._process} {kind} {header}"
        if fields and len((begin + fields).encode()) * 2 > self._limit:
            fields = ""  # the text has the fields too, and can be truncated
        return self._cut(f"{begin}{fields} ", text)

    def _time(self, when: int) -> str:
        second, rest = divmod(when, _SECOND)
        if second != self._second:
            self._second = second
            self._second_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._second_text}.{rest // 1000:06}Z"

    def _cut(self, begin: str, text: str) -> bytes:
        data = (begin + text).encode("utf-8", "backslashreplace")
        if len(data) <= self._limit:
            return data
        size = self._limit - len(f" <{len(data)} bytes were cut>")
        while size and data[size] & 0xC0 == 0x80:  # do not split a character
            size -= 1
        return data[:size] + f" <{len(data) - size} bytes were cut>".encode()


def _element(name: str, items: Iterable[tuple[str, str]]) -> str:
    parts = "".join(_parameters(items))
    return f"[{name}{parts}]" if parts else ""


def _parameters(items: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, value in items:
        yield f' {name}="{escaped(value).translate(_QUOTED)}"'


def _host_name() -> str:
    """Return the name of this machine in the form of RFC 5424: printable ASCII, or ``-``."""
    name = "".join(c for c in socket.gethostname() if "!" <= c <= "~")
    return name[:_HOST_MAX] or "-"


# A syslog server, local or remote.
#
# ::
#
#     syslog                                                  /dev/log, in the form that daemons there expect
#     syslog:unix:///path/to/socket
#     syslog:udp://host[:514]
#     syslog:tcp://host[:601]
#     syslog:tls://host[:6514][?ca=FILE&cert=FILE&key=FILE]
#
# Each may have ``max=BYTES``, the longest message, and ``rfc=3164`` or ``rfc=5424``, its form.

_LOCAL = "/dev/log"

_PORTS = {"udp": 514, "tcp": 601, "tls": 6514}
"""The ports registered by IANA (RFC 5426, RFC 3195, RFC 5425)."""

_LIMITS = {"unix": 8192, "udp": 2048, "tcp": 8192, "tls": 8192}
"""The message sizes in bytes that receivers should accept (RFC 5424, 6.1; RFC 5425, 4.3.1)."""

_LIMIT_MIN, _LIMIT_MAX = 480, 65_000

_FILES = ("ca", "cert", "key")


@dataclass(frozen=True, slots=True)
class SyslogAddress:
    """
    Parsed argument of a log target. ``url`` is used in messages.

    ``transport`` is ``unix``, ``udp``, ``tcp`` or ``tls``. ``form`` is the number of the RFC that defines the format of
    messages, and ``limit`` their maximum size in bytes. ``files`` has the paths of ``ca``, ``cert`` and ``key``.
    """

    url: str
    transport: str
    host: str
    port: int
    form: str
    limit: int
    files: dict[str, str]

    @classmethod
    def parse(cls, argument: str) -> SyslogAddress:
        """Return the address and options in the URL of a log target; raise ``SinkError`` if it is invalid."""
        if not argument:
            return cls("syslog", "unix", _LOCAL, 0, "3164", _LIMITS["unix"], {})
        url = f"syslog:{argument}"
        try:
            parts = urlsplit(argument)
        except ValueError as error:
            raise SinkError(f"log target '{url}': {str(error).lower()}") from error
        try:
            port = parts.port
        except ValueError:
            found = parts.netloc.rpartition(":")[2]
            raise SinkError(f"log target '{url}': expected a port, 1 to 65535, found '{found}'") from None
        transport, host = parts.scheme, parts.hostname or ""
        if transport not in _LIMITS:
            raise SinkError(
                f"log target '{url}': expected unix, udp, tcp or tls and '://', found '{argument}'",
                hint="syslog:udp://host:514, syslog:unix:///dev/log",
            )
        if transport == "unix":
            host = parts.path
        elif parts.path.strip("/"):
            raise SinkError(f"log target '{url}': a host is followed by nothing but its port, found '{parts.path}'")
        if not host:
            raise SinkError(f"log target '{url}' needs a {'path' if transport == 'unix' else 'host'}")
        form, limit, files = _options(url, transport, parts.query)
        return cls(url, transport, host, port or _PORTS.get(transport, 0), form, limit, files)

    def connect(self) -> Datagrams | Stream:
        """Return a connection to the server; raise ``SinkError`` if there is none."""
        is_local = self.transport == "unix"
        name = f"syslog at '{self.host}'" if is_local else f"syslog at '{self.transport}://{self.host}:{self.port}'"
        match self.transport:
            case "unix":
                return Datagrams(name, self.host)
            case "udp":
                return Datagrams(name, (self.host, self.port))
            case "tcp":
                return Stream(name, self.host, self.port)
        return Tls(name, self.host, self.port, self._context())

    def _context(self) -> ssl.SSLContext:
        import ssl

        for path in self.files.values():
            try:
                with Path(path).open("rb"):
                    pass
            except OSError as error:
                raise SinkError(f"'{path}' cannot be read: {reason_of(error)}") from error
        try:
            context = ssl.create_default_context(cafile=self.files.get("ca"))
        except ssl.SSLError as error:
            raise SinkError(f"'{self.files['ca']}' has no certificate in PEM form") from error
        if "cert" in self.files:
            certificate, key = self.files["cert"], self.files.get("key")
            try:
                context.load_cert_chain(certificate, key, password=lambda: b"")
            except ssl.SSLError as error:
                where = f"'{certificate}' and '{key}'" if key else f"'{certificate}'"
                raise SinkError(f"{where} must be a certificate and its key in PEM form, without a password") from error
        return context


def _options(url: str, transport: str, query: str) -> tuple[str, int, dict[str, str]]:
    """
    Return message form, maximum message size in bytes, and TLS files from the query of a URL.

    Raise ``SinkError`` if the query is invalid, or an option does not apply to ``transport``.
    """
    given = dict(parse_qsl(query, keep_blank_values=True))
    known = ("max", "rfc", *(_FILES if transport == "tls" else ()))
    for name in given:
        if name not in known:
            raise SinkError(f"log target '{url}': there is no option '{name}'", hint=f"options are {', '.join(known)}")
    form, limit = given.get("rfc", "5424"), given.get("max", str(_LIMITS[transport]))
    if form not in FORMS:
        raise SinkError(f"log target '{url}': expected rfc={' or '.join(FORMS)}, found '{form}'")
    if not (limit.isascii() and limit.isdigit() and _LIMIT_MIN <= int(limit) <= _LIMIT_MAX):
        raise SinkError(f"log target '{url}': expected max={_LIMIT_MIN} to {_LIMIT_MAX}, found '{limit}'")
    files = {name: given[name] for name in _FILES if name in given}
    for name, path in files.items():
        if not Path(path).is_absolute():
            raise SinkError(f"log target '{url}': the path {name}={path} must be absolute")
    if "key" in files and "cert" not in files:
        raise SinkError(f"log target '{url}': a key needs its certificate, cert=FILE")
    return form, int(limit), files


class SyslogSink:
    """A sink that sends each record as a syslog message."""

    def __init__(self, address: SyslogAddress, format_name: str) -> None:
        self._transport = address.connect()
        is_local = address.transport == "unix"
        self._formatter = SyslogFormatter(format_name, address.form, address.limit, is_local=is_local)
        self.create_event = self._formatter.create_event
        self.destroy_event = self._formatter.destroy_event
        self.close = self._transport.close

    def log_events(self, batch: Batch) -> None:
        """Send the records of a batch, preceded by the number of lost ones."""
        messages = self._formatter.messages(batch)
        if batch.lost:
            self._transport.send([self._formatter.lost_message(batch)], are_records=False)
        self._transport.send(messages)

    def log_tables(self, source: RecordSource, contents: Sequence[TableContents]) -> None:
        """Send a syslog message for each row of a program's keyed tables."""
        from dprobes.formatters.table_addresses import names_for

        names = names_for(source, [each.table for each in contents])
        self._transport.send(self._formatter.table_messages(source, contents, names), are_records=False)

    def flush(self) -> None:
        """Do nothing: messages are sent at once."""


def open(argument: str, options: SinkOptions) -> Sink:  # noqa: A001 - the name that all sinks have
    """Connect to the syslog server whose URL is ``argument``; raise ``SinkError`` if that fails."""
    refuse_binary("syslog", options)
    return SyslogSink(SyslogAddress.parse(argument), options.format_name)
