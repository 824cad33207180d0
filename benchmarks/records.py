"""Measure trace files on one core: writing, decoding, and counting the records for which a condition holds."""

from __future__ import annotations

import resource
import shutil
import struct
import subprocess
from random import Random
from typing import TYPE_CHECKING

from table import Measurement, Unit

from dprobes.record.log_record import LogRecord, decode_record, encode_record
from dprobes.trace.trace_content import LostRecords, TraceRecord
from dprobes.trace.trace_filter import Selection, compile_filter
from dprobes.trace.trace_reader import TraceReader
from dprobes.trace.trace_writer import TraceFileWriter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Literal

__all__ = ["records"]

COUNT = 1_000_000
BATCH = 100
DISTINCT = 20_000
"""Records that are different; a compressor does not see farther."""
ROUNDS = 3
CONDITION = "major == 1 and pid == 42"


def records(directory: Path) -> list[Measurement]:
    """Return the rows about trace files."""
    same = [_record(number, 16) for number in range(DISTINCT)]
    various = [_record(number, number * 7 % 40, name=f"process-{number % 11}") for number in range(DISTINCT)]
    plain, ragged, packed = directory / "same.dpt", directory / "various.dpt", directory / "packed.dpt"
    writing = _best(lambda: _write(plain, same))
    _write(ragged, various)
    compressing = _best(lambda: _write(packed, same, "zstd"))
    single = directory / "single.dpt"
    _write(single, same, together=1)
    loop = _best(lambda: _decode_and_count(plain))
    filtered = _best(lambda: _count(plain))
    text = directory / "same.txt"
    formatting = _seconds(lambda: _format(plain, text))
    grep = _best(lambda: _run("grep", "-c", r"^DProbes(1,.* pid=42 ", str(text)))
    babeltrace = _babeltrace(directory, same)
    size, packed_size = plain.stat().st_size / 1024, packed.stat().st_size / 1024
    return [
        _row(f"trace file: write records, {BATCH} at a time", writing),
        _row("trace file: write records, compressed", compressing),
        Measurement("trace file: size of a million records, compressed", packed_size, "not", size, Unit.KIB),
        _row("trace file: decode all records", _best(lambda: _decode(plain))),
        _row(f"trace file: count records by '{CONDITION}'", filtered, "decode each", loop),
        _row("trace file: the same", filtered, "grep -c on text", grep),
        _row("trace file: the same, with making the text", filtered, "dprobes log, grep -c", formatting + grep),
        _row("trace file: the same", filtered, "babeltrace2 counts all" if babeltrace else "", babeltrace),
        _row("trace file: count, compressed", _best(lambda: _count(packed))),
        _row("trace file: count, each record in a frame of its own", _best(lambda: _count(single))),
        _row("trace file: count, sizes and names vary", _best(lambda: _count(ragged)), "decode each",
             _best(lambda: _decode_and_count(ragged))),
        _row("trace file: count by process name", _best(lambda: _count(ragged, 'name =~ "*-7"'))),
    ]  # fmt: skip


def _row(what: str, seconds: float, peer: str = "", peers: float | None = None) -> Measurement:
    return Measurement(what, COUNT / seconds, peer, COUNT / peers if peers else None, Unit.RATE)


def _record(number: int, size: int, name: str | None = None) -> bytes:
    random = Random(number)
    return encode_record(
        LogRecord(
            major=number % 2, minor=number % 5, cpu=0, pid=40 + number % 7,
            time=10**12 + number * 5_000 + random.randrange(5_000),
            process_name=name, data=random.randbytes(4).ljust(size, b"\0")[:size],
        )
    )  # fmt: skip


def _seconds(action: Callable[[], object]) -> float:
    """Return how long processors were busy with something, which other work on the machine does not change much."""
    before = _busy()
    action()
    return _busy() - before


def _busy() -> float:
    usages = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _best(action: Callable[[], object]) -> float:
    return min(_seconds(action) for _ in range(ROUNDS))


def _run(*command: str) -> None:
    # Not to /dev/null: grep does nothing for that.
    subprocess.run(command, check=True, capture_output=True)


def _write(path: Path, encoded: list[bytes], compress: Literal["zstd"] | None = None, together: int = BATCH) -> None:
    path.unlink(missing_ok=True)
    writer = TraceFileWriter(path, compress=compress)
    program = writer.add_program("benchmark", 1, {})
    firsts = range(0, DISTINCT, together)
    batches = [[(0, record) for record in encoded[first : first + together]] for first in firsts]
    for _ in range(COUNT // DISTINCT):
        for batch in batches:
            writer.write(program, batch)
    writer.close()


def _decode(path: Path) -> None:
    with TraceReader(path) as reader:
        for found in reader.read():
            if isinstance(found, TraceRecord):
                decode_record(found.record)


def _decode_and_count(path: Path) -> int:
    count = 0
    with TraceReader(path) as reader:
        for found in reader.read():
            if isinstance(found, TraceRecord):
                record = decode_record(found.record)
                count += record.major == 1 and record.pid == 42
    return count


def _count(path: Path, condition: str = CONDITION) -> int:
    selection = Selection([compile_filter(condition)])
    with TraceReader(path) as reader:
        return sum(0 if isinstance(found, LostRecords) else selection.count(found) for found in reader.blocks())


def _format(path: Path, text: Path) -> None:
    import sys

    with text.open("w") as output:
        subprocess.run([sys.executable, "-m", "dprobes", "log", "--format", "dprobes", path], stdout=output, check=True)


METADATA = """\
/* CTF 1.8 */
typealias integer { size = 32; align = 8; byte_order = le; } := u32;
typealias integer { size = 8; align = 8; } := u8;
trace { major = 1; minor = 8; byte_order = le; packet.header := struct { u32 magic; u32 stream_id; }; };
clock { name = monotonic; freq = 1000000000; };
typealias integer { size = 64; align = 8; byte_order = le; map = clock.monotonic.value; } := time;
stream { id = 0; event.header := struct { u32 id; time timestamp; }; };
event {
    id = 0; name = "record"; stream_id = 0;
    fields := struct { u32 major; u32 minor; u32 cpu; u32 pid; u8 data[16]; };
};
"""


def _babeltrace(directory: Path, encoded: list[bytes]) -> float | None:
    """Return how long babeltrace2 takes to count the same records as a CTF trace, or None if it is not there."""
    if shutil.which("babeltrace2") is None:
        return None
    trace = directory / "ctf"
    trace.mkdir()
    (trace / "metadata").write_text(METADATA)
    decoded = [decode_record(record) for record in encoded]
    with (trace / "stream").open("wb") as stream:
        stream.write(struct.pack("<II", 0xC1FC1FC1, 0))
        for start in range(0, COUNT, DISTINCT):
            for number, record in enumerate(decoded, start):
                values = (record.major, record.minor, record.cpu, record.pid)
                stream.write(struct.pack("<IQIIII", 0, number, *values) + record.data)
    return _best(lambda: _run("babeltrace2", str(trace), "--component", "sink.utils.counter"))
