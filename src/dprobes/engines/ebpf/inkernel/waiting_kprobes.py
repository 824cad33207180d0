"""
Kprobes that wait for a module: the kernel registers them whenever the module is loaded, before its code runs.

They are lines of ``kprobe_events`` in tracefs of the form ``p:GROUP/EVENT MODULE:SYMBOL+DISTANCE``. The kernel creates
a tracepoint for each line, whether the module is loaded or not, and BPF programs are attached to it. When a module is
loaded, the kernel registers the kprobes of its lines (``trace_kprobe_module_callback`` in kernel/trace/trace_kprobe.c).
The module has been relocated then, but its ``init`` has not run. After the module is unloaded, the kprobes are inactive
until it is loaded again.

Closing the link to a tracepoint takes the kernel 30 to 60 ms, even if many are closed at the same time. Removing a line
after that takes 1 ms, in a separate write or together with others (6.1 and 6.12 in an emulated machine).

Unlike a descriptor, a line remains when its writer is killed. So a guard process (``kprobe_guard``) removes the lines.
If the guard is killed, too, a later run of dprobes removes them. It finds them because a group's name identifies its
process.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
from typing import TYPE_CHECKING

from dprobes.engines.ebpf.attach.run_scope import is_initial_namespace
from dprobes.engines.ebpf.inkernel.kprobe_guard import Guard, remove_lines
from dprobes.engines.ebpf.kernel.bpf_links import KPROBE_REMEDY, link_event
from dprobes.engines.ebpf.kernel.bpf_objects import Descriptors, refused
from dprobes.errors import EngineError, reason_of
from dprobes.platform.linux import perf_calls
from dprobes.platform.linux.procfs import start_time
from dprobes.target.kernel.tracefs import open_trace_files

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.target.kernel.tracefs import TraceFiles

__all__ = ["WaitingLinks", "WaitingProbes", "parse_misses"]

_LINES = "kprobe_events"
_MISSES = "kprobe_profile"
_GROUP = re.compile(r"dprobes_(\d+)_(\d+)_\d+")
_LINE = re.compile(r"[pr]\d*:(\S+?)/(\S+) ")


class WaitingProbes:
    """Kprobes of one session in a kernel module. The owner calls ``close`` after all links are closed."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._stack = contextlib.ExitStack()
        self._files: TraceFiles | None = None
        self._numbers = itertools.count()
        # Objects of one process that exist at the same time differ in their addresses.
        self._group = f"dprobes_{os.getpid()}_{start_time(os.getpid())}_{id(self)}"

    def attach(self, program: int, places: Iterable[tuple[str, int]], *, at_return: bool) -> WaitingLinks:
        """
        Attach a BPF program to ``places``, pairs of ``SYMBOL+DISTANCE`` in the kernel module and a cookie.

        With ``at_return``, the program runs at the returns of the functions. Raise ``EngineError`` if the kernel
        refuses.
        """
        links = WaitingLinks(self)
        try:
            for anchor, cookie in places:
                self._attach_one(links, program, anchor, cookie, at_return=at_return)
        except BaseException:
            links.close()
            raise
        return links

    def _attach_one(self, links: WaitingLinks, program: int, anchor: str, cookie: int, *, at_return: bool) -> None:
        files = self._open()
        # The event's name alone identifies the process, too: the list of misses has no groups.
        name = f"{self._group}/{self._group}_{next(self._numbers)}"
        try:
            files.append(_LINES, f"{'r' if at_return else 'p'}:{name} {self._module}:{anchor}")
            links.lines.append(name)
            link_event(links, program, perf_calls.open_tracepoint(int(files.read(f"events/{name}/id"))), cookie)
        except OSError as error:
            raise self._refusal(error, anchor) from error

    def _open(self) -> TraceFiles:
        """Open tracefs, and start the guard before the first line is written."""
        if self._files is None:
            try:
                files = self._stack.enter_context(open_trace_files())
                _remove_leftovers(files)
                self._stack.enter_context(Guard(self._group, files.descriptor))
            except OSError as error:
                self._stack.close()
                raise EngineError(
                    f"probepoints in the module '{self._module}' cannot be kept: {reason_of(error)}"
                ) from error
            self._files = files
        return self._files

    def missed(self) -> dict[str, int]:
        """
        Return the missed hits, keyed by event name.

        The kernel resets the counter when it registers a kprobe: misses before the module was last loaded are not
        included.
        """
        if self._files is None:
            return {}
        try:
            return parse_misses(self._files.read(_MISSES))
        except OSError:
            return {}

    def remove(self, lines: list[str]) -> None:
        """Remove kprobe events, GROUP/EVENT each, from tracefs; the perf events of them must be closed."""
        if lines:
            remove_lines(self._open().descriptor, lines)

    def close(self) -> None:
        """Stop the guard process that removes kprobes after a crash, and close tracefs."""
        self._files = None
        self._stack.close()

    def _refusal(self, error: OSError, anchor: str) -> EngineError:
        what = f"the probepoint at {self._module}:{anchor}"
        if (problem := _PROBLEMS.get(error.errno or 0)) is not None:
            return EngineError(problem.format(what))
        problem, denied = f"{what} cannot be attached: {reason_of(error)}", f"the kernel does not permit {what}"
        return refused(error, problem, denied, KPROBE_REMEDY)


_NOT_IN_FUNCTION = "{} is not in a function that may be probed"
_PROBLEMS = {
    errno.EILSEQ: "{} is inside an instruction",
    errno.EINVAL: "the kernel excludes {} from probes: it is in code that handles probes, or outside code",
    errno.EADDRNOTAVAIL: _NOT_IN_FUNCTION,
    errno.ENOENT: _NOT_IN_FUNCTION,
}
"""Meaning of the kernel's errors for a line."""


class WaitingLinks(Descriptors):
    """Links to the tracepoints of ``lines`` of ``kprobe_events``; ``close`` removes the lines, too."""

    def __init__(self, owner: WaitingProbes) -> None:
        super().__init__()
        self._owner = owner
        self.lines: list[str] = []

    def missed(self) -> list[int]:
        """Return the hits that each kprobe has missed, including calls whose return the kernel could not track."""
        missed = self._owner.missed()
        return [missed.get(line.partition("/")[2], 0) for line in self.lines]

    def close(self) -> None:
        """Close the BPF links, and remove the kprobe events from tracefs."""
        super().close()
        lines, self.lines = self.lines, []
        self._owner.remove(lines)


def parse_misses(text: str) -> dict[str, int]:
    """
    Return the missed hits by event name.

    A line is ``EVENT HITS MISSES`` (``probes_profile_seq_show`` in kernel/trace/trace_kprobe.c). The misses of a return
    probe include calls whose return the kernel could not track.
    """
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[2]) for row in rows if len(row) == 3}


def _remove_leftovers(files: TraceFiles) -> None:
    """Remove the kprobe events of dprobes processes that were killed together with their guard processes."""
    # Process ids in names are those of the writer's PID namespace; only the initial one shows all processes.
    if not is_initial_namespace():
        return
    lines = [
        (match[1], f"{match[1]}/{match[2]}") for match in map(_LINE.match, files.read(_LINES).splitlines()) if match
    ]
    dead = [name for group, name in lines if (owner := _GROUP.fullmatch(group)) and _is_dead(*map(int, owner.groups()))]
    remove_lines(files.descriptor, dead, patience=0.0)


def _is_dead(pid: int, started: int) -> bool:
    return start_time(pid) != started
