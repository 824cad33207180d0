"""OTLP, as a collector gets it that is killed, busy, picky, or does not answer."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.errors import RecordsRefusedError, SinkError
from dprobes.keyed.table_layout import TableContents, TableRow
from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_origin import Place, RecordSource
from dprobes.rpn.keyed_tables import Table, TableKind
from dprobes.sinks import Batch, SinkOptions
from dprobes.sinks.otlp.otlp_target import endpoint_of, metrics_endpoint_of
from dprobes.sinks.sink_thread import LogTarget
from dprobes.sinks.target_kinds import parse_target
from integration.sinks.collector import Collector, attributes_of
from integration.support import DPROBES, TIMEOUT, Builder, Runner, await_true, environment

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.sinks import Sink

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="OpenTelemetry's exporter is not installed")

FILES = {
    "templates.lst": b"1 t.fmt",
    "t.fmt": b'major = 1\nminor = 1\nfmt = "n=%qu low=%bd name=%*s words=%*d at=%p"\n',
}
SOURCE = RecordSource(1, "app", "app", 1, (), FILES)
PLACE = Place("lib.so", "work+0x10", "", 16)


def batch(first: int, count: int, size: int = 0, **more: Any) -> Batch:
    data = struct.pack("<b", -1) + b"\x01\x02\x00ab" + b"\x00\x08\x00" + struct.pack("<qQ", -5, 2**64 - 1) + bytes(size)
    records = [
        encode_record(
            LogRecord(major=1, minor=1, pid=7, tid=8, uid=0, ip=2**64 - 1, time=n, process_name="a\udcff",
                      data=struct.pack("<Q", n) + data)
        )
        for n in range(first, first + count)
    ]  # fmt: skip
    return Batch(SOURCE, records, [PLACE] * count, 10**18, **more)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


def opened(port: int) -> Sink:
    sink = parse_target(f"otlp:http://127.0.0.1:{port}").open(SinkOptions())
    sink.create_event(SOURCE)
    return sink


def test_a_record_is_a_log_record_with_typed_attributes(collector: Collector) -> None:
    sink = opened(collector.port)
    before = time.time_ns()
    sink.log_events(batch(5, 1))
    sink.flush()
    sink.close()
    (record,) = collector.records
    assert before <= record.pop("observed") <= time.time_ns()
    assert record == {
        "time": 10**18 + 5,
        "severity": (9, "INFO"),
        "body": record["body"],
        "attributes": {
            "dprobes.program": "app", "dprobes.module": "lib.so", "dprobes.symbol": "work+0x10",
            "code.function.name": "work", "dprobes.placed": 16, "dprobes.major": 1, "dprobes.minor": 1,
            "process.pid": 7, "thread.id": 8, "user.id": "0", "dprobes.process_name": "a\\xff",
            "dprobes.ip": "0xffffffffffffffff", "dprobes.field.n": 5, "dprobes.field.low": -1,
            "dprobes.field.name": "ab", "dprobes.field.words": [-5], "dprobes.field.at": "0xffffffffffffffff",
        },
    }  # fmt: skip
    assert record["body"].endswith("  n=5 low=-1 name=ab words=-5 at=0xffffffffffffffff")
    (resource,) = collector.resources
    assert (resource["service.name"], resource["host.name"]) == ("dprobes", socket.gethostname())
    assert collector.requests[0][0] == "/v1/logs"


def test_values_that_otlp_has_no_type_for(collector: Collector) -> None:
    sink = opened(collector.port)
    data = struct.pack("<Q", 2**64 - 1) + b"\x7f" + b"\xff\x08\x00" + struct.pack("<Q", 16)
    strange = [
        encode_record(LogRecord(major=1, minor=1, time=2**64 - 1, data=data)),
        encode_record(LogRecord(major=1, minor=2, data=b"\1\2")),
        encode_record(LogRecord(data=b"\1\2", is_stack_trace=True)),
        b"\xff\xff\xff\xff none",
    ]
    sink.log_events(Batch(SOURCE, strange, [PLACE] * 4, 10**18))
    sink.close()
    fields = [
        {name.removeprefix("dprobes."): value for name, value in record["attributes"].items()
         if name.startswith(("dprobes.field", "dprobes.data", "dprobes.stack"))}
        for record in collector.records
    ]  # fmt: skip
    assert fields == [
        {"field.n": "18446744073709551615", "field.low": 127, "field.name": "<fault at 0x10>"},
        {"data": b"\1\2"},
        {"stack_trace": True, "data": b"\1\2"},
        {"data": b"\xff\xff\xff\xff none"},
    ]
    assert [record["time"] for record in collector.records] == [0] * 4


def test_lost_records_are_said_once_with_those_that_follow(collector: Collector) -> None:
    sink = opened(collector.port)
    collector.answers = [(404, {})]
    following = batch(1, 2, lost=7)
    with pytest.raises(SinkError):
        sink.log_events(following)
    sink.log_events(following)
    sink.close()
    note, *others = collector.records
    assert (note["body"], note["severity"]) == ("<7 records of 'app' were lost here>", (13, "WARN"))
    assert note["attributes"] == {"dprobes.program": "app", "dprobes.lost": 7}
    assert len(others) == 2


def test_large_batches_go_in_several_requests(collector: Collector) -> None:
    sink = opened(collector.port)
    sink.log_events(batch(0, 5000))
    assert len(collector.requests) == 3
    collector.judge = lambda numbers: 500 if 5020 in numbers else 200
    large = batch(5000, 40, size=60_000)
    with pytest.raises(SinkError) as caught:
        sink.log_events(large)
    left = caught.value.left
    assert left is not None
    assert (caught.value.message, caught.value.taken, caught.value.lost) == (
        f"'http://127.0.0.1:{collector.port}/v1/logs' answers 500 Internal Server Error", 40 - len(left), 0,
    )  # fmt: skip
    assert {n - 5000 for n in collector.numbers() if n >= 5000} == set(range(40)) - set(left)
    collector.judge = lambda numbers: 200
    sink.log_events(large._replace(records=[large.records[n] for n in left], places=[PLACE] * len(left)))
    sink.close()
    assert collector.numbers() == list(range(5040))


def test_several_requests_are_under_way_at_once(collector: Collector) -> None:
    sink = opened(collector.port)
    collector.gate.clear()
    sender = threading.Thread(target=sink.log_events, args=(batch(0, 8000),))
    sender.start()
    await_true(lambda: collector.waiting == 4, "four requests")
    collector.gate.set()
    sender.join()
    sink.close()
    assert collector.numbers() == list(range(8000))


def test_a_busy_collector_is_asked_again_when_it_says(collector: Collector, capfd: pytest.CaptureFixture[str]) -> None:
    sink = opened(collector.port)
    collector.answers = [(503, {"Retry-After": "0"}), (429, {"Retry-After": "0"})]
    sink.log_events(batch(0, 10))
    assert collector.numbers() == list(range(10))
    collector.answers = [(503, {"Retry-After": "3600"})]
    with pytest.raises(SinkError) as caught:
        sink.log_events(batch(10, 10))
    assert caught.value.message.endswith("/v1/logs' answers 503 Service Unavailable")
    assert (caught.value.taken, caught.value.lost) == (0, 0)
    sink.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("status", [301, 401, 404])
def test_what_is_no_success_is_an_error(collector: Collector, status: int) -> None:
    sink = opened(collector.port)
    collector.answers = [(status, {"Location": "/elsewhere"})]
    with pytest.raises(SinkError, match=f"answers {status} ") as caught:
        sink.log_events(batch(0, 10))
    assert (caught.value.taken, caught.value.lost) == (0, 0)
    sink.close()


def answering_by_turns(turns: int, answer: tuple[int, dict[str, str]]) -> list[tuple[int, dict[str, str]]]:
    """Return answers of which one in so many is not the usual one."""
    return [*[(200, {})] * (turns - 1), answer] * 100


@pytest.mark.parametrize("answer", [(400, {}), (413, {}), (429, {"Retry-After": "0"}), (503, {"Retry-After": "1"})])
def test_every_fourth_request_is_not_taken_and_no_record_is_lost(
    collector: Collector, answer: tuple[int, dict[str, str]]
) -> None:
    collector.answers = answering_by_turns(4, answer)
    name = f"otlp:http://127.0.0.1:{collector.port}"
    target = LogTarget(name, lambda: parse_target(name).open(SinkOptions()))
    target.create([SOURCE])
    for first in range(0, 10_000, 500):
        target.put(batch(first, 500))
    status = target.close(patience=60)
    assert (status.written, status.lost, status.waiting) == (10_000, 0, 0)
    assert collector.numbers() == list(range(10_000))


def test_only_the_records_that_the_collector_cannot_read_are_lost(collector: Collector) -> None:
    bad = {0, 700, 701, 1999}
    collector.judge = lambda numbers: 400 if bad & set(numbers) else 200
    sink = opened(collector.port)
    with pytest.raises(RecordsRefusedError) as caught:
        sink.log_events(batch(0, 2000))
    url = f"http://127.0.0.1:{collector.port}/v1/logs"
    assert (caught.value.message, caught.value.lost) == (f"'{url}' has rejected records: 400 Bad Request", 4)
    assert collector.numbers() == [n for n in range(2000) if n not in bad]
    sink.close()


def test_a_collector_that_takes_nothing_is_not_asked_for_each_record(collector: Collector) -> None:
    collector.judge = lambda numbers: 422
    sink = opened(collector.port)
    for first in (0, 2000, 4000):
        with pytest.raises(RecordsRefusedError) as caught:
            sink.log_events(batch(first, 2000))
        assert caught.value.lost == 2000
    assert len(collector.requests) < 200
    collector.judge = lambda numbers: 200
    sink.log_events(batch(6000, 10))
    sink.close()


def test_requests_get_smaller_for_a_collector_that_finds_them_too_large(collector: Collector) -> None:
    sizes: list[int] = []

    def judge(numbers: list[int]) -> int:
        sizes.append(len(numbers))
        return 413 if len(numbers) > 100 else 200

    collector.judge = judge
    sink = opened(collector.port)
    sink.log_events(batch(0, 3000))
    sizes.clear()
    sink.log_events(batch(3000, 3000))
    assert max(sizes) <= 100
    sink.close()
    assert collector.numbers() == list(range(6000))


def test_a_wait_for_a_busy_collector_can_be_aborted(collector: Collector) -> None:
    collector.judge = lambda numbers: 503
    name = f"otlp:http://127.0.0.1:{collector.port}"
    target = LogTarget(name, lambda: parse_target(name).open(SinkOptions()))
    target.create([SOURCE])
    target.put(batch(0, 10))
    await_true(lambda: len(collector.requests) > 0, "a request")
    status = target.close(patience=0.2)
    assert (status.written, status.lost) == (0, 10)
    await_true(lambda: not target._thread.is_alive(), "the end of the thread")
    assert len(collector.requests) < 4


def test_at_the_end_only_what_was_not_confirmed_is_lost(collector: Collector) -> None:
    hanging = threading.Event()

    def judge(numbers: list[int]) -> int:
        if 3000 in numbers:
            hanging.wait(TIMEOUT)
            return 503
        return 200

    collector.judge = judge
    name = f"otlp:http://127.0.0.1:{collector.port}"
    target = LogTarget(name, lambda: parse_target(name).open(SinkOptions()))
    target.create([SOURCE])
    target.put(batch(0, 20_000))
    await_true(lambda: target._sink is not None and getattr(target._sink, "steps", 0) >= 7, "all answers but one")
    status = target.close(patience=0.2)
    hanging.set()
    arrived = len(collector.numbers())
    assert arrived > 10_000
    assert (status.written, status.lost) == (arrived, 20_000 - arrived)


def test_rejected_records_are_counted_as_lost_and_said(collector: Collector) -> None:
    collector.reject = 3
    said: list[str] = []
    name = f"otlp:http://127.0.0.1:{collector.port}"
    target = LogTarget(name, lambda: parse_target(name).open(SinkOptions()), on_problem=said.append)
    target.create([SOURCE])
    target.put(batch(0, 10))
    await_true(lambda: target.status().lost == 3, "the loss")
    target.put(batch(10, 10))
    status = target.close()
    assert (status.written, status.lost, status.waiting) == (14, 6, 0)
    assert said[0] == f"'http://127.0.0.1:{collector.port}/v1/logs' has rejected records: too old"
    assert len(collector.records) == 14


def test_a_collector_that_is_killed_and_comes_back_gets_everything(capfd: pytest.CaptureFixture[str]) -> None:
    first = Collector()
    said: list[str] = []
    name = f"otlp:http://127.0.0.1:{first.port}"
    target = LogTarget(name, lambda: parse_target(name).open(SinkOptions()), on_problem=said.append)
    target.create([SOURCE])
    target.put(batch(0, 1000))
    await_true(lambda: target.status().written == 1000, "the first thousand")
    first.kill()
    time.sleep(0.1)
    target.put(batch(1000, 1000))
    await_true(lambda: target.status().problem is not None, "the problem")
    second = Collector(first.port)
    target.put(batch(2000, 1000))
    await_true(lambda: target.status().written == 3000, "the rest")
    status = target.close()
    second.kill()
    assert (status.written, status.lost, status.problem) == (3000, 0, None)
    got = sorted([*first.numbers(), *second.numbers()])
    assert got == list(range(3000))
    assert said[0].startswith(f"'http://127.0.0.1:{first.port}/v1/logs' cannot be reached: ")
    assert capfd.readouterr() == ("", "")


def test_a_collector_that_does_not_answer(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    sink = opened(collector.port)
    collector.gate.clear()
    with pytest.raises(SinkError) as caught:
        sink.log_events(batch(0, 10))
    assert caught.value.message == f"'http://127.0.0.1:{collector.port}/v1/logs' has not answered in time"
    assert caught.value.taken == 0
    sink.close()


def test_headers_compression_and_attributes_come_from_the_environment(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x,tenant=7")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.port}/base")
    sink = parse_target("otlp").open(SinkOptions("json"))
    sink.create_event(SOURCE)
    sink.log_events(batch(0, 1))
    sink.close()
    ((path, headers),) = collector.requests
    assert (path, headers["authorization"], headers["tenant"]) == ("/base/v1/logs", "Bearer x", "7")
    (resource,) = collector.resources
    assert (resource["service.name"], resource["deployment.environment"]) == ("mine", "test")
    assert json.loads(collector.records[0]["body"])["fields"]["n"] == 0


def test_https_needs_a_certificate_that_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True, timeout=TIMEOUT,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    collector = Collector(context=context)
    target = parse_target(f"otlp:https://127.0.0.1:{collector.port}")
    sink = target.open(SinkOptions())
    sink.create_event(SOURCE)
    with pytest.raises(SinkError, match=r"cannot be reached safely: .*certificate verify failed"):
        sink.log_events(batch(0, 1))
    sink.close()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(certificate))
    sink = target.open(SinkOptions())
    sink.create_event(SOURCE)
    sink.log_events(batch(0, 1))
    sink.close()
    collector.kill()
    assert collector.numbers() == [0]


def test_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    assert endpoint_of("") == "http://localhost:4318/v1/logs"
    assert endpoint_of("https://host:1/") == "https://host:1/v1/logs"
    assert endpoint_of("https://host/otlp/logs?x=1") == "https://host/otlp/logs?x=1"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:1/base/")
    assert endpoint_of("") == "http://a:1/base/v1/logs"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "http://b:2")
    assert endpoint_of("") == "http://b:2"
    assert endpoint_of("http://c:3") == "http://c:3/v1/logs"


def test_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def error_of(name: str, format_name: str = "text") -> tuple[str, str | None]:
        with pytest.raises(SinkError) as caught:
            parse_target(name).open(SinkOptions(format_name))
        return caught.value.message, caught.value.hint

    for wrong in ("localhost:4318", "ftp://host", "http://", "http://host:x", "http://[::1"):
        assert error_of(f"otlp:{wrong}") == (
            f"log target 'otlp': expected http://HOST:PORT or https://HOST:PORT, found '{wrong}'",
            "otlp:http://localhost:4318",
        )
    assert error_of("otlp:", "binary") == ("log target 'otlp' takes text, not --log-format binary", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert error_of("otlp:http://host") == (
        "log target 'otlp' needs OpenTelemetry's exporter", "pip install 'dprobes[otlp]'",
    )  # fmt: skip


PROGRAM = 'name = "{program}"\nmajor = 7\noffset = tick\nminor = 3\npush r, arg0\nlog 1\nexit\n'


def test_a_run_sends_what_json_says(run: Runner, build: Builder, collector: Collector) -> None:
    program = build("hotloop.c")
    target = f"otlp:http://127.0.0.1:{collector.port}"
    result = run.command(PROGRAM.format(program=program), program, "50", options=["--log-target", target])
    assert len(result.records) == 50
    names = {"dprobes.major": "major", "dprobes.minor": "minor", "process.pid": "pid", "thread.id": "tid",
             "dprobes.process_name": "name", "dprobes.module": "module", "dprobes.symbol": "symbol"}  # fmt: skip
    for sent, said in zip(collector.records, result.records, strict=True):
        assert {name: sent["attributes"][name] for name in names} == {name: said[key] for name, key in names.items()}
        assert int(sent["attributes"]["dprobes.field.arg0"]) == int(said["fields"]["arg0"])
    assert collector.requests[0][1]["content-type"] == "application/x-protobuf"


def test_a_run_without_a_collector_ends_and_counts(run: Runner, build: Builder, collector: Collector) -> None:
    program = build("hotloop.c")
    collector.kill()
    target = f"otlp:http://127.0.0.1:{collector.port}"
    result = run.command(PROGRAM.format(program=program), program, "50", options=["--log-target", target])
    assert "Traceback" not in result.stderr
    assert "export" not in result.stderr  # what the SDK itself would print
    assert "cannot be reached: connection refused" in result.stderr
    assert "has lost 50 records" in result.stderr


TABLES = """
name = tallied
table = calls, count, word
table = sizes, hist, unit = bytes
table = all, stats, word
table = least, min
offset = event
    push 3
    tally calls
    push r, arg0
    tally sizes
    push 3
    push r, arg0
    tally all
    push r, arg0
    tally least
    abort
"""


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="not root")


@pytest.mark.parametrize("engine", ["ptrace", pytest.param("ebpf", marks=needs_root)])
def test_tables_are_metrics(collector: Collector, build: Builder, tmp_path: Path, engine: str) -> None:
    source = tmp_path / "tables.rpn"
    source.write_text(TABLES)
    target = f"otlp:http://127.0.0.1:{collector.port}"
    command = ["run", source, "--engine", engine, "--log-target", target, "--format", "json"]
    done = subprocess.run(
        [*DPROBES, *map(str, command), "--", str(build("tallied.c", "-pthread")), "300"],
        capture_output=True, text=True, timeout=TIMEOUT, check=True, env=environment(),
    )  # fmt: skip
    rows = {row["table"]: row for line in done.stdout.splitlines() if line[0] == "{" for row in [json.loads(line)]}
    found = {metric.name: metric for metric in collector.metrics}
    assert sorted(found) == [
        "dprobes.all.count", "dprobes.all.max", "dprobes.all.min", "dprobes.all.sum", "dprobes.calls",
        "dprobes.least", "dprobes.sizes",
    ]  # fmt: skip
    (calls,) = found["dprobes.calls"].sum.data_points
    assert (calls.as_int, attributes_of(calls.attributes)) == (300, {"dprobes.program": "tallied", "key0": "3"})
    assert found["dprobes.calls"].sum.is_monotonic
    assert calls.start_time_unix_nano < calls.time_unix_nano
    all_ = rows["all"]
    numbers = [
        found["dprobes.all.count"].sum.data_points[0].as_int,
        found["dprobes.all.sum"].sum.data_points[0].as_int,
        found["dprobes.all.min"].gauge.data_points[0].as_int,
        found["dprobes.all.max"].gauge.data_points[0].as_int,
    ]
    assert numbers == [all_["count"], all_["sum"], all_["min"], all_["max"]]
    assert found["dprobes.least"].gauge.data_points[0].as_int == all_["min"] == rows["least"]["value"]
    (sizes,) = found["dprobes.sizes"].histogram.data_points
    assert (found["dprobes.sizes"].unit, sizes.count) == ("By", 300)
    assert len(sizes.bucket_counts) == len(sizes.explicit_bounds) + 1
    counted = {(low, high): number for low, high, number in rows["sizes"]["buckets"]}
    edges = [None, *sizes.explicit_bounds, None]
    for low, high, number in zip(edges, edges[1:], sizes.bucket_counts, strict=False):
        if low is not None and high is not None:
            assert counted.get((int(low) + 1, int(high) + 1), 0) == number
    assert sum(sizes.bucket_counts) == 300


def test_tables_come_again_if_the_collector_is_busy_and_not_if_it_refuses_them(collector: Collector) -> None:
    source = RecordSource(3, "app", "app", 1)
    told: list[str] = []
    table = TableContents(Table("hits", TableKind.COUNT), (TableRow(b"", (5,)),), 2)
    target = LogTarget("otlp", lambda: opened(collector.port), on_problem=told.append)
    collector.answers = [(503, {"Retry-After": "0"}), (200, {}), (400, {})]
    target.create([source])
    target.put_tables(source, [table])
    await_true(lambda: len(collector.metrics) == 2, "the tables")
    assert [metric.name for metric in collector.metrics] == ["dprobes.hits", "dprobes.hits.lost"]
    assert [metric.sum.data_points[0].as_int for metric in collector.metrics] == [5, 2]
    target.put_tables(source, [table])
    await_true(lambda: any("has rejected tables: 400" in each for each in told), "the refusal")
    target.close()
    assert len(collector.metrics) == 2


@pytest.mark.parametrize(
    ("endpoint", "metrics"),
    [
        ("http://h:1/v1/logs", "http://h:1/v1/metrics"),
        ("http://h/x/v1/logs", "http://h/x/v1/metrics"),
        ("http://h/x", None),
    ],
)
def test_metrics_go_beside_log_records(endpoint: str, metrics: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert metrics_endpoint_of(endpoint) == metrics
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://m/1")
    assert metrics_endpoint_of(endpoint) == "http://m/1"
