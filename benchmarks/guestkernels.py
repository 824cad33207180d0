"""
Measure probepoints in the kernel, in guests, beside bpftrace and programs that do nothing.

All of a row was measured in one guest. It is an emulated machine, in which all takes 10 to 13 times as long as here:
only ratios mean something.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING

from inguest import seconds_of_bare_links, work_with_files
from kernel_hits import HANDLERS
from table import Measurement

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from guests.guest import Guest

__all__ = ["guest_kernels"]

HERE = Path(__file__).parent
KERNELS = ("6.1",)
WITH_MANY = ("6.12",)
"""The kernels that take many functions with one link (CONFIG_FPROBE)."""

MEMORY = 1500
ROUNDS = 2
HITS = 20_000
FUNCTION = "null_lseek"
HEADER = "name = vmlinux\nmodtype = kernel\nvars = 2\n"
COUNT = "inc lv, 0\nabort\n"
MANY, FEW = 4000, 60
PATIENCE, REPEAT = 300.0, 20.0
DISK = "/tmp/disk"
ROOM = {"BPFTRACE_MAX_PROBES": "10000", "BPFTRACE_PERF_RB_PAGES": "1024"}


@dataclass(slots=True)
class _Best:
    """The best of what a tracer took, in seconds: from the start until all is attached, and to end after Ctrl-C."""

    active: float = float("inf")
    ending: float = float("inf")

    def note(self, active: float, ending: float) -> None:
        self.active, self.ending = min(self.active, active), min(self.ending, ending)


def guest_kernels(directory: Path) -> list[Measurement]:
    """Return the rows about probepoints in the kernels of guests."""
    sys.path.append(str(HERE.parent / "tests"))
    from guests.emulator import Machine
    from guests.guest import boot, resumed
    from guests.images import UnavailableError

    seek = directory / "seek"
    subprocess.run(["gcc", "-O1", "-o", seek, HERE / "seek.c"], check=True)
    rows = []
    for kernel in KERNELS:
        try:
            snapshot = boot(Machine(kernel, memory=MEMORY, programs=("bpftrace",)))
        except UnavailableError as error:
            rows.append(Measurement(f"{kernel} in a guest ({error})", None))
            continue
        with contextlib.closing(snapshot), resumed(snapshot) as guest:
            guest.put("/tmp/seek", seek)
            guest.put(str(HERE / "inguest.py"), HERE / "inguest.py")
            rows += [*_hits(guest), *_thousands(guest), *_file_system(guest)]
    return rows


@contextlib.contextmanager
def _running(guest: Guest, best: _Best, command: Sequence[str], begun: str) -> Iterator[None]:
    """Run a tracer meanwhile that says when all is attached, and take its times."""
    from guests.emulator import GuestError

    begin = time.monotonic()
    process = guest.start(command, environment=ROOM)
    process.await_output(begun, PATIENCE)
    active = time.monotonic() - begin
    yield
    begin = time.monotonic()
    process.signal(SIGINT)
    # bpftrace overlooks one that comes just before it sleeps.
    while process.status is None and time.monotonic() < begin + PATIENCE:
        with contextlib.suppress(GuestError):
            guest.wait_until(lambda: process.status is not None, "the end of a tracer", REPEAT)
            break
        process.signal(SIGINT)
    assert process.wait(1) == 0, process.stderr
    best.note(active, time.monotonic() - begin)


def _dprobes(guest: Guest, best: _Best, program: str) -> contextlib.AbstractContextManager[None]:
    from guests.initramfs import PYTHON

    guest.put("/tmp/bench.rpn", HEADER + program)
    options = ("--engine", "ebpf", "--overhead", "off", "-o", "/dev/null")
    command = (str(PYTHON), "-m", "dprobes", "run", *options, "/tmp/bench.rpn")
    return _running(guest, best, command, "Ctrl-C ends the run")


def _bpftrace(guest: Guest, best: _Best, probes: str) -> contextlib.AbstractContextManager[None]:
    # It attaches in the order of the program, and then runs BEGIN.
    command = ("bpftrace", "-o", "/dev/null", "-e", f'{probes} BEGIN {{ system("echo begun >&2"); }}', "--unsafe")
    return _running(guest, best, command, "begun")


@contextlib.contextmanager
def _empty(guest: Guest, kind: str) -> Iterator[None]:
    from guests.initramfs import PYTHON

    process = guest.start((str(PYTHON), str(HERE / "inguest.py"), FUNCTION, kind))
    process.await_output("attached", PATIENCE)
    yield
    process.close_input()
    process.completed(PATIENCE)


def _hits(guest: Guest) -> Iterator[Measurement]:
    """Measure what a hit adds to a system call that comes to the function."""
    kernel = guest.machine.kernel
    best: dict[str, float] = {}
    ignored = _Best()
    handlers = HANDLERS[:2]

    def note(what: str) -> None:
        took = float(guest.run(("/tmp/seek", str(HITS)), timeout=PATIENCE).stdout)
        best[what] = min(best.get(what, float("inf")), took)

    for _ in range(ROUNDS):
        note("unprobed")
        for kind in ("single", "many") if kernel in WITH_MANY else ("single",):
            with _empty(guest, kind):
                note(f"empty, {kind}")
        for handler in handlers:
            with _dprobes(guest, ignored, f"offset = {FUNCTION}\n{handler.rpn}\n"):
                note(f"ours: {handler.what}")
            with _bpftrace(guest, ignored, f"kprobe:{FUNCTION} {{ {handler.bpftrace} }}"):
                note(f"theirs: {handler.what}")

    def microseconds(what: str) -> float:
        return (best[what] - best["unprobed"]) / 1000

    single = microseconds("empty, single")
    if kernel in WITH_MANY:
        what = f"{kernel}, a hit by ftrace (kprobe_multi): an empty program"
        yield Measurement(what, microseconds("empty, many"), "an empty kprobe", single)
    for handler in handlers:
        ours, what = microseconds(f"ours: {handler.what}"), f"{kernel}, a hit in the kernel: {handler.what}"
        yield Measurement(what, ours, "an empty kprobe", single)
        yield Measurement(what, ours, "bpftrace", microseconds(f"theirs: {handler.what}"))


def _thousands(guest: Guest) -> Iterator[Measurement]:
    """Measure attaching and detaching many functions."""
    kernel = guest.machine.kernel
    patterns = _patterns(guest, MANY if kernel in WITH_MANY else FEW)
    ours, theirs, one = _Best(), _Best(), _Best()
    bare, places = _Best(), 0
    for _ in range(ROUNDS):
        places, *seconds = guest.call(seconds_of_bare_links, patterns, kernel in WITH_MANY, timeout=PATIENCE)
        bare.note(*seconds)
        with _dprobes(guest, one, f"offset = {FUNCTION}\n{COUNT}"):
            pass
        program = "".join(f'offset = "{p}"\nminor = {n}\n{COUNT}' for n, p in enumerate(patterns, 1))
        with _dprobes(guest, ours, program):
            pass
        probes = ", ".join(f"kprobe:{pattern}" for pattern in patterns)
        with _bpftrace(guest, theirs, f"{probes} {{ @ = count(); }}"):
            pass
    how = "one link" if kernel in WITH_MANY else "a kprobe each"
    what = f"{kernel}, {places} functions of the kernel, {how}"
    yield Measurement(f"{what}: start to all armed", ours.active * 1e6, "bpftrace", theirs.active * 1e6)
    yield Measurement(f"{what}: start to all armed", ours.active * 1e6, "one function", one.active * 1e6)
    yield Measurement(f"{what}: Ctrl-C to the end", ours.ending * 1e6, "bpftrace", theirs.ending * 1e6)
    yield Measurement(f"{what}: the calls alone, attach", bare.active * 1e6, "detach", bare.ending * 1e6)


def _patterns(guest: Guest, count: int) -> list[str]:
    """Return patterns of so many functions, about, that both tracers take; handlers themselves call none of these."""
    listed = guest.run("cat /sys/kernel/tracing/available_filter_functions").stdout.splitlines()
    letters = 1 if count > FEW else 4
    starts = Counter(line[:letters] for line in listed if " [" not in line and re.match(r"[ac-z]{1,4}", line))
    patterns: list[str] = []
    room = count + count // 10
    for start, members in sorted(starts.items(), key=lambda item: (-item[1], item[0])):
        if members <= room:
            patterns.append(f"{start}*")
            room -= members
        if room < count // 5:
            break
    return patterns


def _file_system(guest: Guest) -> Iterator[Measurement]:
    """Measure what it costs a file system that all of its functions are probed, at the entry and at the return."""
    kernel = guest.machine.kernel
    what = f"{kernel}, work with files, entry and exit of all functions of ext4"
    if kernel not in WITH_MANY:
        yield Measurement(f"{what} (needs kprobe_multi)", None)
        return
    guest.load_module("brd", "rd_nr=1 rd_size=32768")
    guest.run(f"mkfs.ext4 -q /dev/ram0 && mkdir {DISK} && mount /dev/ram0 {DISK}")
    times: dict[str, float] = {}
    ignored = _Best()

    def note(who: str) -> None:
        took = guest.call(work_with_files, DISK, timeout=PATIENCE)
        times[who] = min(times.get(who, float("inf")), took)

    both = f'offset = "ext4_*"\nminor = 1\n{COUNT}offset = "ext4_*"\nreturn = yes\nminor = 2\ninc lv, 1\nabort\n'
    theirs = "kprobe:ext4_* { @ = count(); } kretprobe:ext4_* { @r = count(); }"
    for _ in range(ROUNDS):
        note("unprobed")
        with _dprobes(guest, ignored, both):
            note("ours")
        with _bpftrace(guest, ignored, theirs):
            note("theirs")
    yield Measurement(what, times["ours"] * 1e6, "unprobed", times["unprobed"] * 1e6)
    yield Measurement(what, times["ours"] * 1e6, "bpftrace", times["theirs"] * 1e6)
