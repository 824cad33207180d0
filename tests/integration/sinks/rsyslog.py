"""A private rsyslogd: its own configuration, sockets and ports, and what it has received as JSON."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from integration.support import TIMEOUT, await_true

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Certificates", "Rsyslog", "free_port"]

_MODULES = (
    "/usr/lib/x86_64-linux-gnu/rsyslog",
    "/usr/lib/rsyslog",
    "/usr/lib64/rsyslog",
    "/usr/lib/aarch64-linux-gnu/rsyslog",
)

_CONFIGURATION = """
global(workDirectory="{directory}" maxMessageSize="64k" {tls})
module(load="imuxsock" SysSock.Use="off")
module(load="imudp")
module(load="imtcp" {tls_module})
{inputs}
template(name="json" type="list" option.jsonf="on") {{
    property(outname="priority" name="pri" format="jsonf")
    property(outname="time" name="timereported" dateFormat="rfc3339" format="jsonf")
    property(outname="host" name="hostname" format="jsonf")
    property(outname="app" name="app-name" format="jsonf")
    property(outname="process" name="procid" format="jsonf")
    property(outname="kind" name="msgid" format="jsonf")
    property(outname="structured" name="structured-data" format="jsonf")
    property(outname="message" name="msg" format="jsonf")
}}
action(type="omfile" file="{directory}/received.json" template="json")
"""


class Certificates:
    """Make a certificate authority, and certificates of it; each needs openssl once."""

    def __init__(self, directory: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("openssl is not installed")
        self._directory = directory
        self.authority = self._self_signed("authority")
        self.other_authority = self._self_signed("other")
        self.server = self._signed("server", "subjectAltName=DNS:localhost")
        self.client = self._signed("client", "subjectAltName=DNS:client")

    def _self_signed(self, name: str) -> Path:
        path = self._directory / f"{name}.pem"
        self._openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
            *("-subj", f"/CN=dprobes {name}", "-keyout", self.key(path), "-out", path),
        )
        return path

    def _signed(self, name: str, extension: str) -> Path:
        path = self._directory / f"{name}.pem"
        request, extensions = path.with_suffix(".csr"), path.with_suffix(".ext")
        extensions.write_text(extension + "\n")
        self._openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", self.key(path), "-out", request),
        )
        self._openssl(
            *("x509", "-req", "-in", request, "-CA", self.authority, "-CAkey", self.key(self.authority)),
            *("-CAcreateserial", "-days", "2", "-extfile", extensions, "-out", path),
        )
        return path

    @staticmethod
    def key(certificate: Path) -> Path:
        return certificate.with_suffix(".key")

    @staticmethod
    def _openssl(*arguments: object) -> None:
        subprocess.run(
            ["openssl", *map(str, arguments)],
            check=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT,
        )


class Rsyslog:
    """
    Run rsyslogd with every kind of input; ``directory`` must have a short name, for sockets have.

    With ``certificates`` the TCP input is TLS, and asks for a certificate of its authority if ``asks`` is set.
    """

    def __init__(self, directory: Path, certificates: Certificates | None = None, *, asks: bool = False) -> None:
        if shutil.which("rsyslogd") is None and not Path("/usr/sbin/rsyslogd").exists():
            pytest.skip("rsyslogd is not installed (package rsyslog)")
        if certificates is not None and not any((Path(path) / "lmnsd_gtls.so").exists() for path in _MODULES):
            pytest.skip("rsyslogd has no TLS (package rsyslog-gnutls)")
        self.directory = directory
        # A copy: AppArmor, where it is, has ideas of its own where rsyslogd may read and write.
        self._program = directory / "rsyslogd"
        shutil.copy(shutil.which("rsyslogd") or "/usr/sbin/rsyslogd", self._program)
        self.socket = directory / "log"
        self.old_socket = directory / "old"
        self.udp_port, self.tcp_port = free_port(socket.SOCK_DGRAM), free_port()
        self._output = directory / "received.json"
        self._configuration = directory / "rsyslog.conf"
        self._configuration.write_text(self._text(certificates, asks=asks))
        self._read = 0
        self._was_killed = False
        self._received: list[dict[str, Any]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def _text(self, certificates: Certificates | None, *, asks: bool) -> str:
        quick = 'RateLimit.Interval="0"'
        inputs: Sequence[str] = (
            f'input(type="imuxsock" Socket="{self.socket}" {quick} UseSpecialParser="off" IgnoreTimestamp="off")',
            f'input(type="imuxsock" Socket="{self.old_socket}" {quick})',
            f'input(type="imudp" address="127.0.0.1" port="{self.udp_port}")',
            f'input(type="imtcp" address="127.0.0.1" port="{self.tcp_port}")',
        )
        tls = tls_module = ""
        if certificates is not None:
            tls = (
                f'defaultNetstreamDriver="gtls" defaultNetstreamDriverCAFile="{certificates.authority}" '
                f'defaultNetstreamDriverCertFile="{certificates.server}" '
                f'defaultNetstreamDriverKeyFile="{certificates.key(certificates.server)}"'
            )
            mode = "x509/certvalid" if asks else "anon"
            tls_module = f'streamDriver.name="gtls" streamDriver.mode="1" streamDriver.authMode="{mode}"'
        return _CONFIGURATION.format(directory=self.directory, inputs="\n".join(inputs), tls=tls, tls_module=tls_module)

    def start(self) -> None:
        """Start it, and wait until it listens."""
        if self._was_killed and self._output.exists():
            with self._output.open("ab") as file:
                file.write(b"\n")  # what it writes now must not go on a line that is torn
        for path in (self.socket, self.old_socket):
            path.unlink(missing_ok=True)
        log = self.directory / "rsyslogd.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [self._program, "-n", "-f", self._configuration, "-i", self.directory / "pid"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            )
        await_true(self._listens, f"rsyslogd; it said {log.read_text()}")

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.directory / "rsyslogd.log").read_text()
        ports = Path("/proc/net/udp").read_text()
        if not (self.socket.exists() and self.old_socket.exists() and f":{self.udp_port:04X} " in ports):
            return False
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.tcp_port), timeout=1):
            return True
        return False

    def end(self, *, kill: bool = False) -> None:
        """End it; unless it is killed, it writes what it has received before."""
        process, self._process = self._process, None
        if process is None:
            return
        if kill:
            self._was_killed = True
            process.kill()
        else:
            process.terminate()
        try:
            process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(TIMEOUT)
            raise

    def received(self) -> list[dict[str, Any]]:
        """Return the messages of dprobes that were received so far, whole ones."""
        if self._output.exists():
            with self._output.open("rb") as file:
                file.seek(self._read)
                lines, end, _ = file.read().rpartition(b"\n")
            self._read += len(lines) + len(end)
            messages = [message for line in lines.splitlines() if line and (message := self._message(line)) is not None]
            self._received += [message for message in messages if message["app"] == "dprobes"]
        return self._received

    def _message(self, line: bytes) -> dict[str, Any] | None:
        """Return what a line says, or None for one that was torn when rsyslogd was killed."""
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            assert self._was_killed, line
            return None
        return found

    def await_count(self, count: int) -> list[dict[str, Any]]:
        """Wait until there are as many messages, and return them."""
        await_true(lambda: len(self.received()) >= count, f"{count} messages")
        return self.received()


def free_port(kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    with socket.socket(socket.AF_INET, kind) as end:
        end.bind(("127.0.0.1", 0))
        port: int = end.getsockname()[1]
        return port
