"""Measure thousands of probepoints in one library: inserting them, removing them, and what memory they take."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from table import Measurement, Unit
from tracing import Tracer, bpftrace, dprobes, has_bpftrace

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DIRECTORIES", "many_places", "mapper"]

ROUNDS = 3
LIBRARY = "libcrypto.so.3"
DIRECTORIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")
PATTERNS = ("OPENSSL_version_major", "EVP_PKEY_CTX_*", "[!E]*")
"""One function, about 100, and about 4 000."""

_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")
MAPPER = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(flush=True); sys.stdin.read()"


@dataclass(slots=True)
class _Best:
    """The best figures of all rounds: seconds, KiB of the tracer and of the probed process, seconds."""

    active: float = float("inf")
    memory: float = float("inf")
    private: float = float("inf")
    ending: float = float("inf")


def many_places(directory: Path) -> list[Measurement]:
    """Return the rows about many probepoints."""
    found = next((path for name in DIRECTORIES if (path := Path(name) / LIBRARY).exists()), None)
    if found is None:
        return [Measurement(f"4 000 functions of {LIBRARY} (not installed)", None)]
    # A copy is a file of its own, so that nobody else's processes are probed.
    library = directory / LIBRARY
    library.write_bytes(found.read_bytes())
    figures: dict[int, _Best] = {}
    for _ in range(ROUNDS):
        for pattern in PATTERNS:
            places, figure = _ours(directory, library, pattern)
            best = figures.setdefault(places, _Best())
            for name in _Best.__slots__:
                setattr(best, name, min(getattr(best, name), getattr(figure, name)))
    rows = []
    theirs = _theirs(directory, library) if has_bpftrace() else {}
    for places, best in sorted(figures.items()):
        what = f"{places} function{'s' * (places > 1)} of {LIBRARY}"
        peer = theirs.get(places)
        name = "bpftrace" if peer else ""
        rows += [
            Measurement(f"{what}: start to all armed", best.active * 1e6, name, peer.active * 1e6 if peer else None),
            Measurement(f"{what}: Ctrl-C to the end", best.ending * 1e6, name, peer.ending * 1e6 if peer else None),
            Measurement(f"{what}: peak memory", best.memory, name, peer.memory if peer else None, Unit.KIB),
            Measurement(
                f"{what}: private memory of a process", best.private, name, peer.private if peer else None, Unit.KIB
            ),
        ]
    return rows


def _ours(directory: Path, library: Path, pattern: str) -> tuple[int, _Best]:
    source = directory / "many.rpn"
    source.write_text(f'name = "{library}"\nvars = 1\noffset = "{pattern}"\ninc lv, 0\nabort\n')
    with mapper(library) as pid:
        before = _private(pid, library)
        with Tracer(dprobes(source), directory) as tracer:
            active = tracer.wait_until_attached(1) - tracer.started
            places = tracer.attached
            private = _private(pid, library) - before
            usage = tracer.stop()
    return places, _Best(active, usage.memory, private, usage.ending)


def _theirs(directory: Path, library: Path) -> dict[int, _Best]:
    """Measure about 100 places, once: the kernel takes 0.1 s to detach each, as each has an event of its own."""
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    places = len(re.findall(r" T EVP_PKEY_CTX_\w+", listed))
    with mapper(library) as pid:
        before = _private(pid, library)
        with Tracer(bpftrace(f"uprobe:{library}:EVP_PKEY_CTX_*", "@ = count();"), directory) as tracer:
            active = tracer.wait_until_attached(places) - tracer.started
            private = _private(pid, library) - before
            usage = tracer.stop()
    return {places: _Best(active, usage.memory, private, usage.ending)}


@contextmanager
def mapper(library: Path) -> Iterator[int]:
    """Run a process that maps the library; yield its id."""
    command = [sys.executable, "-c", MAPPER, str(library)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.stdin.close()


def _private(pid: int, library: Path) -> int:
    """Return the KiB that a process has of the library as copies of its own, and of pages for uprobes."""
    kib, counts = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if _MAPPING.match(line):
            counts = line.endswith((str(library), "[uprobes]"))
        elif counts and line.startswith("Anonymous:"):
            kib += int(line.split()[1])
    return kib
