"""A collector of OTLP, for tests of log targets."""

from __future__ import annotations

import contextlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from integration.support import TIMEOUT

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(each) for each in value.array_value.values]
    return getattr(value, kind)


def attributes_of(attributes: Any) -> dict[str, Any]:
    return {each.key: value_of(each.value) for each in attributes}


def plain(record: Any) -> dict[str, Any]:
    return {
        "time": record.time_unix_nano,
        "observed": record.observed_time_unix_nano,
        "severity": (record.severity_number, record.severity_text),
        "body": value_of(record.body),
        "attributes": attributes_of(record.attributes),
    }


class Collector:
    """
    A server that takes log records over HTTP, and keeps them as plain data.

    ``answers`` are statuses and headers of the next requests before all is well again; ``judge`` is asked for them
    then, with the numbers of the records. ``reject`` is how many records of each request are refused in an answer that
    says that all is well. ``waiting`` requests wait at the gate.
    """

    def __init__(self, port: int = 0, context: ssl.SSLContext | None = None) -> None:
        self.records: list[dict[str, Any]] = []
        self.resources: list[dict[str, Any]] = []
        self.metrics: list[Any] = []
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.answers: list[tuple[int, dict[str, str]]] = []
        self.connections: list[socket.socket] = []
        self.judge: Callable[[list[int]], int] = lambda numbers: 200
        self.reject = self.waiting = 0
        self.gate = threading.Event()
        self.gate.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                collector.connections.append(self.connection)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.waiting += 1
                collector.gate.wait(TIMEOUT)
                collector.waiting -= 1
                collector.answer(self, body)

            def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - its name
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", port), Handler)
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
            ExportLogsServiceRequest,
            ExportLogsServiceResponse,
        )

        self.requests.append((handler.path, {name.lower(): value for name, value in handler.headers.items()}))
        if handler.path == "/v1/metrics":
            self.answer_metrics(handler, body)
            return
        groups = ExportLogsServiceRequest.FromString(body).resource_logs
        records = [record for group in groups for scope in group.scope_logs for record in scope.log_records]
        if self.answers:
            status, headers = self.answers.pop(0)
        else:
            status, headers = self.judge([record.time_unix_nano - 10**18 for record in records]), {}
        response = ExportLogsServiceResponse()
        if status == 200:
            for group in groups:
                self.resources.append(attributes_of(group.resource.attributes))
                for scope in group.scope_logs:
                    self.records += (plain(record) for record in scope.log_records[self.reject :])
            if self.reject:
                response.partial_success.rejected_log_records = self.reject
                response.partial_success.error_message = "too old"
        data = response.SerializeToString()
        with contextlib.suppress(OSError):
            handler.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(data)

    def answer_metrics(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

        status, headers = self.answers.pop(0) if self.answers else (200, {})
        if status == 200:
            groups = ExportMetricsServiceRequest.FromString(body).resource_metrics
            self.metrics += [m for group in groups for scope in group.scope_metrics for m in scope.metrics]
        handler.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()

    def numbers(self) -> list[int]:
        return sorted(record["attributes"]["dprobes.field.n"] for record in self.records)

    def kill(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
