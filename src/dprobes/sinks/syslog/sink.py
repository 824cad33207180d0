"""
A syslog server, here or elsewhere.

::

    syslog                                                  /dev/log, in the form that daemons there expect
    syslog:unix:///path/to/socket
    syslog:udp://host[:514]
    syslog:tcp://host[:601]
    syslog:tls://host[:6514][?ca=FILE&cert=FILE&key=FILE]

Each may have ``max=BYTES``, the longest message, and ``rfc=3164`` or ``rfc=5424``, its form.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from dprobes.errors import SinkError, reason_of
from dprobes.lazydataclass import dataclass
from dprobes.sinks.bytesinks import refuse_binary
from dprobes.sinks.syslog.messages import FORMS, SyslogFormatter
from dprobes.sinks.syslog.transports import Datagrams, Stream, Tls

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from dprobes.keyed.contents import TableContents
    from dprobes.record.origin import RecordSource
    from dprobes.sinks.interface import Batch, Sink, SinkOptions

__all__ = ["SyslogAddress", "SyslogSink", "open"]

_LOCAL = "/dev/log"

_PORTS = {"udp": 514, "tcp": 601, "tls": 6514}
"""What IANA has registered (RFC 5426, RFC 3195, RFC 5425)."""

_LIMITS = {"unix": 8192, "udp": 2048, "tcp": 8192, "tls": 8192}
"""What receivers should take (RFC 5424, 6.1; RFC 5425, 4.3.1)."""

_LIMIT_MIN, _LIMIT_MAX = 480, 65_000

_FILES = ("ca", "cert", "key")


@dataclass(frozen=True, slots=True)
class SyslogAddress:
    """Hold what the argument of a log target says; ``url`` is for messages."""

    url: str
    transport: str
    host: str
    port: int
    form: str
    limit: int
    files: dict[str, str]

    @classmethod
    def parse(cls, argument: str) -> SyslogAddress:
        """Return what an argument says; raise ``SinkError`` if that cannot be."""
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
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
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
        known = ("max", "rfc", *(_FILES if transport == "tls" else ()))
        for name in given:
            if name not in known:
                raise SinkError(
                    f"log target '{url}': there is no option '{name}'", hint=f"options are {', '.join(known)}"
                )
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
        return cls(url, transport, host, port or _PORTS.get(transport, 0), form, int(limit), files)

    def connect(self) -> Datagrams | Stream:
        """Return the way to the server; raise ``SinkError`` if there is none."""
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


class SyslogSink:
    """Send each record as a message."""

    def __init__(self, address: SyslogAddress, format_name: str) -> None:
        self._transport = address.connect()
        is_local = address.transport == "unix"
        self._formatter = SyslogFormatter(format_name, address.form, address.limit, is_local=is_local)
        self.create_event = self._formatter.create_event
        self.destroy_event = self._formatter.destroy_event
        self.close = self._transport.close

    def log_events(self, batch: Batch) -> None:
        """Send the records of a batch, and before them how many were lost."""
        messages = self._formatter.messages(batch)
        if batch.lost:
            self._transport.send([self._formatter.lost_message(batch)], are_records=False)
        self._transport.send(messages)

    def log_tables(self, source: RecordSource, contents: Sequence[TableContents]) -> None:
        """Send each row of keyed tables as a message."""
        from dprobes.formatters.tablenames import names_for

        names = names_for(source, [each.table for each in contents])
        self._transport.send(self._formatter.table_messages(source, contents, names), are_records=False)

    def flush(self) -> None:
        """Do nothing: what is sent is on its way."""


def open(argument: str, options: SinkOptions) -> Sink:  # noqa: A001 - the name that all sinks have
    """Open the way to the server that is named."""
    refuse_binary("syslog", options)
    return SyslogSink(SyslogAddress.parse(argument), options.format_name)
