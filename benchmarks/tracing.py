"""Run tracers beside what they trace: DProbes with its eBPF engine, and bpftrace, each on all processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from table import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = [
    "BUFFERS",
    "BYTE_CODE",
    "CPUS",
    "DPROBES",
    "HERE",
    "Loop",
    "Tracer",
    "Usage",
    "bpftrace",
    "byte_code",
    "dprobes",
    "has_bpftrace",
    "on_cpus",
    "until",
]

HERE = Path(__file__).parent
DPROBES = (sys.executable, "-m", "dprobes")
CPUS = sorted(os.sched_getaffinity(0))
"""Probed loops run on the first CPU, tracers on the last one."""

BUFFERS = {"BPFTRACE_PERF_RB_PAGES": "4096"}
"""The environment in which bpftrace has as much room for records as we, so that it loses none either."""

BYTE_CODE = {"with": True, "without": False}
"""What rows about starts say of byte code on disk: many containers set PYTHONDONTWRITEBYTECODE."""

_PATIENCE = 60.0
_REPEAT = 20.0
"""Seconds after which Ctrl-C is sent once more: bpftrace overlooks one that comes just before it sleeps."""

_DESCRIPTION = re.compile(r"^(\w+):\s*(.*)$", re.MULTILINE)


def on_cpus(cpus: Sequence[int], *command: str) -> list[str]:
    """Return a command that runs another one on these CPUs, before other work of the machine."""
    return ["nice", "-n", "-10", "taskset", "-c", ",".join(map(str, cpus)), *command]


def byte_code(directory: Path, *, is_there: bool) -> dict[str, str]:
    """
    Return an environment in which Python finds byte code of all modules, or of none and keeps none.

    The byte code is this benchmark's own, in ``directory``; the first start writes it.
    """
    place = {"PYTHONPYCACHEPREFIX": str(directory / ("bytecode" if is_there else "nothing"))}
    return place | {"PYTHONDONTWRITEBYTECODE": "" if is_there else "1"}


def has_bpftrace() -> bool:
    return shutil.which("bpftrace") is not None


def dprobes(source: Path, *options: str) -> list[str]:
    """Return the command that runs a program on all processes."""
    return [*DPROBES, "run", "--engine", "ebpf", "--overhead", "off", str(source), *options]


def bpftrace(probe: str, action: str) -> list[str]:
    """Return the command that runs an action at a probe."""
    return ["bpftrace", "-e", f"{probe} {{ {action} }}"]


def until(condition: Callable[[], bool], what: str) -> float:
    """Wait for a condition; return the time at which it held."""
    end = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise BenchmarkError(f"waited {_PATIENCE:.0f} s in vain for {what}")
        time.sleep(0.001)
    return time.monotonic()


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tracer took: peak memory in KiB, processor time and the time that it took to end in seconds."""

    memory: int
    cpu: float
    ending: float


class Tracer:
    """
    Run a tracer, output and messages going to files; leaving the context stops it by Ctrl-C.

    ``cpus`` are those that it may run on.
    """

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        cpus: Sequence[int] = CPUS[-1:],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.output, self._messages = directory / "tracer.out", directory / "tracer.err"
        self._usage: Usage | None = None
        self.started = time.monotonic()
        with self.output.open("wb") as output, self._messages.open("wb") as messages:
            command = on_cpus(cpus, *command)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=messages,
                env=os.environ | dict(environment or {}),
            )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def messages(self) -> str:
        return self._messages.read_text(errors="replace")

    def descriptors(self) -> Iterator[dict[str, str]]:
        """Iterate over what the kernel says of the tracer's descriptors (``/proc/PID/fdinfo``)."""
        directory = Path(f"/proc/{self.pid}/fdinfo")
        try:
            for path in list(directory.iterdir()):
                yield dict(_DESCRIPTION.findall(path.read_text()))
        except OSError:
            return  # one of them, or all, are gone

    @property
    def attached(self) -> int:
        """How many places the kernel's links and events for uprobes have."""
        links = sum(int(d.get("uprobe_cnt", 0)) for d in self.descriptors())
        return links or max(0, self._events() - len(CPUS))  # bpftrace has an event for its records on each CPU as well

    def _events(self) -> int:
        names = (name.readlink() for name in Path(f"/proc/{self.pid}/fd").iterdir())
        return sum("perf" in str(name) for name in names)

    def wait_until_attached(self, places: int) -> float:
        """Return when there were so many places at least."""

        def are_attached() -> bool:
            if self._process.poll() is not None:
                raise BenchmarkError(f"the tracer ended: {self.messages}")
            try:
                return self.attached >= places
            except OSError:  # a descriptor was closed meanwhile
                return False

        return until(are_attached, f"{places} uprobes of a tracer")

    def processor_time(self) -> float:
        """Return the seconds of processor time that it has taken so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def uprobe_programs(self) -> set[int]:
        """Return the ids of its uprobe programs: it may have closed their descriptors, and hold links alone."""
        return {
            int(d["prog_id"])
            for d in self.descriptors()
            if d.get("prog_type") == "2" or d.get("link_type") == "uprobe_multi"  # BPF_PROG_TYPE_KPROBE
        }

    def _peak_memory(self) -> int:
        """Return its peak memory in KiB, 0 when it has ended. What wait4(2) says would count us, who started it."""
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{self.pid}/status").read_text(), re.MULTILINE)
        return int(found[1]) if found else 0

    def stop(self) -> Usage:
        """Stop the tracer as Ctrl-C does, and return what it took."""
        if self._usage is None:
            begin, pid, asked = time.monotonic(), 0, float("-inf")
            memory = 0
            while not pid:
                memory = self._peak_memory() or memory
                if time.monotonic() - asked > _REPEAT:
                    asked = time.monotonic()
                    os.kill(self.pid, signal.SIGINT)  # Popen would collect a tracer that has ended already
                time.sleep(0.001)
                pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            self._process.returncode = os.waitstatus_to_exitcode(status)
            took = time.monotonic() - begin
            self._usage = Usage(memory, usage.ru_utime + usage.ru_stime, took)
        return self._usage


class Loop:
    """Hold the compiled ``loop.c``, which times itself."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "bench_loop"
        subprocess.run(
            ["gcc", "-O1", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls", "-o", self.path, HERE / "loop.c"],
            check=True,
        )
        self.probe = f"uprobe:{self.path}:called"

    def calls(self, count: int, rounds: int = 1, *, is_deep: bool = False) -> float:
        """Return the nanoseconds of a call of ``called``, the best of some rounds, on a CPU of its own."""
        return min(self._best(str(count), "deep" if is_deep else "calls") for _ in range(rounds))

    def several(self, count: int) -> float:
        """Return the same of calls of ``called``, ``second`` and ``third`` in turns."""
        return self._best(str(count), "several")

    def turns(self, count: int, rounds: int = 1) -> float:
        """Return the nanoseconds of a turn of the paper's loop, measured likewise."""
        return min(self._best(str(count)) for _ in range(rounds))

    def _best(self, *arguments: str) -> float:
        done = subprocess.run(on_cpus(CPUS[:1], str(self.path), *arguments), capture_output=True, text=True, check=True)
        return float(done.stderr.partition("BEST ")[2])

    def waiting(self) -> subprocess.Popen[str]:
        """Start a loop that says when its calls become slow; leaving its context ends it."""
        command = on_cpus(CPUS[:1], str(self.path), str(int(_PATIENCE)), "armed")
        return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_until_armed(self, waiting: subprocess.Popen[str] | None = None) -> float:
        """Return the time of the first slow call of ``called``, which is a loop's that waits, or one of its own."""
        if waiting is None:
            with self.waiting() as own:
                return self.wait_until_armed(own)
        assert waiting.stderr is not None
        _, found, nanoseconds = waiting.stderr.readline().partition("ARMED ")
        if not found:
            raise BenchmarkError("no probe was armed within a minute")
        return float(nanoseconds) / 1e9
