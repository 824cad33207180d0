"""
Attachment of loaded BPF programs to file offsets, kernel functions, tracepoints, clocks and hardware breakpoints.

An attachment lasts until the ``Descriptors`` with its links are closed, or this process exits or is killed. If a
function raises an error, it has removed its links.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.lower.lowering_request import Placement
from dprobes.engines.ebpf.kernel.bpf_objects import PERF_REMEDY, Descriptors, finished, load, refused
from dprobes.engines.ebpf.kernel.kernel_features import Feature
from dprobes.errors import EngineError, NotSupportedError, TargetError, reason_of, reason_of_number
from dprobes.platform.linux import perf_calls
from dprobes.platform.linux.bpf_calls import (
    AttachType,
    KprobeMulti,
    ProgramType,
    UprobeMulti,
    link_kprobes,
    link_perf_event,
    link_uprobes,
    open_raw_tracepoint,
)
from dprobes.platform.linux.call_proxy import close_in_proxy
from dprobes.platform.linux.procfs import online_cpus
from dprobes.rpn.performance_counters import counter_named
from dprobes.rpn.rpn_program import Access
from dprobes.target.btf import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from dprobes.bpf.bpf_assembler import Assembled
    from dprobes.bpf.map_layouts import MapName
    from dprobes.engines.ebpf.kernel.kernel_features import Features, KernelTypes
    from dprobes.rpn.rpn_program import Sampler
    from dprobes.target.kernel.traced_fields import TracedEvent

__all__ = [
    "ACCESSES",
    "EXCLUDED",
    "KPROBE_REMEDY",
    "SINGLE_UPROBES_MAX",
    "CpuLinks",
    "EntryKprobes",
    "ProgramForm",
    "UprobeLinks",
    "attach_breakpoint",
    "attach_kernel",
    "attach_sampler",
    "attach_tracepoint",
    "attach_tracepoints",
    "attach_trampoline",
    "attach_typed_tracepoint",
    "attach_uprobes",
    "form_of",
    "is_refused",
    "kernel_attach_type",
    "trampoline_form",
    "uprobe_attach_type",
]

SINGLE_UPROBES_MAX = 16
"""
Maximum number of uprobes on a kernel without uprobe_multi, where each needs a link of its own.

The kernel takes about 0.1 s to detach each of them, one after the other, because it waits for all CPUs each time.
"""


class UprobeLinks(Descriptors):
    """Links of uprobes; ``close`` removes all breakpoints even if this process is killed meanwhile."""

    def close(self) -> None:
        """Remove the uprobes."""
        close_in_proxy(self.detach())


_ENOTSUPP = 524  # include/linux/errno.h; not for user space, but uprobes return it


def uprobe_attach_type(features: Features) -> AttachType:
    """Return the attach type for loading programs for ``attach_uprobes``."""
    return AttachType.TRACE_UPROBE_MULTI if Feature.UPROBE_MULTI in features else AttachType.NONE


def attach_uprobes(
    program: int,
    path: str,
    places: Sequence[tuple[int, int]],
    features: Features,
    *,
    pid: int | None = None,
    at_return: bool = False,
    counters: Sequence[int] = (),
    shown: str = "",
) -> Descriptors:
    """
    Attach a BPF program to ``places``, pairs of a file offset and a cookie.

    The offsets must be those of instructions that the kernel supports. ``counters`` has, for each place, the file
    offset of the semaphore to increment while attached, or 0.

    If the kernel supports it (``Feature.UPROBE_MULTI_PROCESS``), ``pid`` restricts hits to one process, without its
    children. This avoids the hits of other processes, but the BPF program must still check the process. ``shown`` is
    the file's name in errors. Raise a ``DprobesError`` if the kernel refuses.
    """
    shown = shown or path
    if Feature.UPROBE_MULTI in features:
        process = pid if pid is not None and Feature.UPROBE_MULTI_PROCESS in features else 0
        flags = UprobeMulti.RETURN if at_return else UprobeMulti.NONE
        offsets, cookies = [offset for offset, _ in places], [cookie for _, cookie in places]
        try:
            return UprobeLinks((link_uprobes(program, path, offsets, cookies, flags, process, counters),))
        except OSError as error:
            raise _uprobe_error(error, shown, offsets, counts=any(counters)) from error
    if len(places) > SINGLE_UPROBES_MAX:
        raise NotSupportedError(
            f"{len(places)} probepoints in '{shown}' are too many for this kernel: it has no uprobe_multi links, "
            "attaches them one by one, and takes 0.1 s to detach each",
            hint=f"use at most {SINGLE_UPROBES_MAX} probepoints, Linux 6.6 or later, or --engine ptrace",
        )
    return _single_uprobes(program, path, places, pid, at_return=at_return, counters=counters, shown=shown)


def _single_uprobes(
    program: int,
    path: str,
    places: Sequence[tuple[int, int]],
    pid: int | None,
    *,
    at_return: bool,
    counters: Sequence[int],
    shown: str,
) -> UprobeLinks:
    offset = 0

    def events() -> Iterator[tuple[int, int]]:
        nonlocal offset
        unit = perf_calls.uprobe_unit()
        process = -1 if pid is None else pid
        for (offset, cookie), counter in zip(places, counters or [0] * len(places), strict=True):
            event = perf_calls.open_uprobe(unit, path, offset, pid=process, is_return=at_return, counter=counter)
            yield event, cookie

    try:
        return link_events(program, events(), UprobeLinks())
    except OSError as error:
        raise _uprobe_error(error, shown, [offset], counts=any(counters)) from error


Links = TypeVar("Links", bound=Descriptors)


def link_event(links: Descriptors, program: int, event: int, cookie: int) -> None:
    """
    Attach a BPF program to the event with the descriptor ``event``.

    Add the link, which keeps it open, to ``links``.
    """
    try:
        links.add(link_perf_event(program, event, cookie))
        perf_calls.enable(event)
    finally:
        os.close(event)


def link_events(program: int, events: Iterable[tuple[int, int]], links: Links) -> Links:
    """
    Attach a BPF program to events, and add the links to ``links``, which is returned.

    ``events`` has pairs of a descriptor and a cookie. The links keep the events open. Raise OSError with the kernel's
    error, after closing ``links``.
    """
    try:
        for event, cookie in events:
            link_event(links, program, event, cookie)
    except BaseException:
        links.close()
        raise
    return links


def _what(offsets: Sequence[int]) -> str:
    return f"the probepoint at {offsets[0]:#x}" if len(offsets) == 1 else f"the {len(offsets)} probepoints"


def _uprobe_error(
    error: OSError, path: str, offsets: Sequence[int], *, counts: bool = False
) -> EngineError | TargetError:
    """Return the error for the kernel's refusal of uprobes; ``counts`` is True if they raise semaphores."""
    what, reason = _what(offsets), reason_of_number(error.errno or 0)
    match error.errno:
        case errno.ENOENT | errno.ENOTDIR:
            return TargetError(f"'{path}' no longer exists")
        case errno.EBADF:
            return TargetError(f"'{path}' is not a regular file")
        case errno.ESRCH:
            return TargetError("the process has ended")
        case errno.EOPNOTSUPP if counts:
            return NotSupportedError(
                f"this kernel cannot raise the semaphore of the USDT probe of {what} in '{path}'",
                hint="use --engine ptrace",
            )
        case number if number in (_ENOTSUPP, errno.EOPNOTSUPP):
            return NotSupportedError(
                f"the kernel cannot execute the instruction of {what} in '{path}' out of line",
                hint="use --engine ptrace",
            )
        case errno.EINVAL if counts:
            return EngineError(
                f"the kernel refuses {what} in '{path}', which the semaphore of a USDT probe guards",
                hint="another tracer may have a probe at the same place that does not raise the semaphore: the kernel "
                "takes both only if they agree; --engine ptrace does not ask it",
            )
        case errno.EIO | errno.EINVAL:
            return EngineError(
                f"the kernel refuses {what} in '{path}' ({reason})",
                hint="the file may be on a file system that uprobes cannot read, or have changed",
            )
    denied = f"the kernel does not permit to attach uprobes to '{path}'"
    remedy = "run as root, or with the capabilities CAP_BPF and CAP_PERFMON"
    return refused(error, f"{what} in '{path}' cannot be attached: {reason}", denied, remedy)


def attach_typed_tracepoint(
    tracepoint: str, program: Assembled, maps: Mapping[MapName, int], types: KernelTypes
) -> int:
    """Load a program, attach it to a tracepoint with arguments typed by BTF, and return the link's descriptor."""
    fd = load(
        program,
        maps,
        ProgramType.TRACING,
        attach_type=AttachType.TRACE_RAW_TP,
        attach_btf_id=types.tracepoint(tracepoint),
        name=tracepoint,
    )
    try:
        return open_raw_tracepoint(fd)
    finally:
        os.close(fd)


def attach_tracepoints(
    programs: Mapping[str, Assembled], maps: Mapping[MapName, int], types: KernelTypes
) -> Descriptors:
    """
    Load BPF programs, and attach each to the tracepoint with BTF that is its key, in order.

    The result has their links. ``maps`` has the descriptors of the maps that the programs name.
    """
    links = Descriptors()
    try:
        for tracepoint, program in programs.items():
            links.add(attach_typed_tracepoint(tracepoint, program, maps, types))
    except BaseException:
        links.close()
        raise
    return links


class ProgramForm(NamedTuple):
    """Load parameters of a BPF program: type, attach type, and BTF id of the attach target, or 0 for none."""

    kind: ProgramType
    attach_type: AttachType
    btf_id: int


def form_of(traced: TracedEvent, types: KernelTypes) -> ProgramForm:
    """Return the program type, attach type and BTF id with which programs for a tracepoint are loaded."""
    from dprobes.target.kernel.traced_fields import Source

    if traced.source is Source.RECORD:
        return ProgramForm(ProgramType.TRACEPOINT, AttachType.NONE, 0)
    return ProgramForm(ProgramType.TRACING, AttachType.TRACE_RAW_TP, types.tracepoint(traced.name))


def attach_tracepoint(traced: TracedEvent, program: int) -> Descriptors:
    """Attach a loaded program to a tracepoint; raise ``EngineError`` if the kernel refuses."""
    from dprobes.target.kernel.traced_fields import Source

    try:
        if traced.source is not Source.RECORD:
            return Descriptors((open_raw_tracepoint(program),))
        # One event runs the program on every CPU (perf_trace_run_bpf_submit in kernel/events/core.c).
        return link_events(program, ((perf_calls.open_tracepoint(each), 0) for each in (traced.event,)), Descriptors())
    except OSError as error:
        problem = f"the tracepoint '{traced.name}' cannot be attached to: {reason_of(error)}"
        denied = f"the kernel does not permit to attach to the tracepoint '{traced.name}'"
        raise refused(error, problem, denied, PERF_REMEDY) from error


_ATTACH_TYPES = {
    Placement.FENTRY: AttachType.TRACE_FENTRY,
    Placement.FEXIT: AttachType.TRACE_FEXIT,
    Placement.MODIFY_RETURN: AttachType.MODIFY_RETURN,
}

_OF_THE_PLACE = (errno.EINVAL, errno.ENOENT, errno.EBUSY, errno.EOPNOTSUPP, errno.ENODEV, 524, errno.E2BIG)
"""Errors that the function causes. 524 is ENOTSUPP, which is not in errno.h of user space."""


def trampoline_form(placement: Placement, function: str, types: KernelTypes) -> ProgramForm:
    """Return the load parameters of the program at a kernel function's trampoline."""
    return ProgramForm(ProgramType.TRACING, _ATTACH_TYPES[placement], types.find(Kind.FUNC, function))


def is_refused(placement: Placement, function: str, types: KernelTypes) -> bool:
    """
    Return whether the kernel refuses to load programs for a function's trampoline, by loading an empty one.

    Raise ``EngineError`` if the refusal is not due to the function.
    """
    kind, attach_type, identifier = trampoline_form(placement, function, types)
    program = finished(Assembler())
    try:
        os.close(load(program, {}, kind, attach_type=attach_type, attach_btf_id=identifier, name="trial"))
    except OSError as error:
        if error.errno not in _OF_THE_PLACE:
            raise _trampoline_refusal(error, function) from error
        return True
    return False


def attach_trampoline(program: int, function: str, *, is_one_of_many: bool) -> Descriptors | str:
    """
    Attach a program to the function for which it was loaded, by a BPF trampoline.

    If the kernel refuses because of the function, and ``is_one_of_many`` is True, return the reason. Raise
    ``EngineError`` for all other refusals.
    """
    try:
        return Descriptors((open_raw_tracepoint(program),))
    except OSError as error:
        if is_one_of_many and error.errno in _OF_THE_PLACE:
            return f"the kernel puts no trampoline there ({reason_of(error)})"
        raise _trampoline_refusal(error, function) from error


def _trampoline_refusal(error: OSError, function: str) -> EngineError:
    problem = f"the kernel puts no trampoline at '{function}': {reason_of(error)}"
    denied = f"the kernel does not permit a trampoline at '{function}'"
    return refused(error, problem, denied, "run as root; 'dprobes doctor' shows what this kernel supports")


ACCESSES = {
    Access.EXECUTE: perf_calls.Access.EXECUTE,
    Access.WRITE: perf_calls.Access.WRITE,
    Access.READ_WRITE: perf_calls.Access.READ | perf_calls.Access.WRITE,
}
"""Kernel flags for the accesses that hit a watchpoint."""


class CpuLinks(Descriptors):
    """
    Links of a BPF program to one event on each CPU. ``open_event`` opens the event of a CPU and returns its descriptor.

    The kernel removes the events of a CPU that goes offline (``perf_event_exit_cpu_context`` in
    ``kernel/events/core.c``). Their descriptors remain open, and their debug registers reserved. So a CPU that comes
    online needs new events, and ``program`` must stay open as long as CPUs may come online.
    """

    def __init__(self, program: int, open_event: Callable[[int], int], cookie: int = 0) -> None:
        super().__init__()
        self._program = program
        self._open_event = open_event
        self._cookie = cookie
        self._links: dict[int, int] = {}
        try:
            for cpu in online_cpus():
                self.renew(cpu)
        except BaseException:
            self.close()
            raise

    def renew(self, cpu: int) -> None:
        """Attach to a new event of a CPU that has come online, in place of its old event."""
        if cpu in self._links:
            os.close(self.remove(self._links.pop(cpu)))
        try:
            event = self._open_event(cpu)
        except OSError as error:
            if error.errno == errno.ENODEV:
                return  # it has gone offline meanwhile
            raise
        (link,) = link_events(self._program, [(event, self._cookie)], Descriptors()).detach()
        self._links[cpu] = self.add(link)


def attach_breakpoint(
    program: int,
    address: int,
    size: int,
    access: perf_calls.Access,
    *,
    cookie: int = 0,
    threads: Iterable[int] | None = None,
) -> Descriptors:
    """
    Attach a PERF_EVENT program to a hardware breakpoint on ``size`` bytes of user addresses.

    If ``threads`` is None, every process is watched. Otherwise only these threads are watched, and all threads and
    processes that they start. The program must then not use the cookie, which inherited events do not have
    (``perf_event_alloc``). Raise OSError with the kernel's error, which is ENOSPC if the four debug registers are in
    use.
    """
    if threads is None:
        return CpuLinks(program, lambda cpu: perf_calls.open_breakpoint(address, size, access, cpu=cpu), cookie)
    events = ((perf_calls.open_breakpoint(address, size, access, pid=tid, inherit=True), cookie) for tid in threads)
    return link_events(program, events, Descriptors())


_NANOSECONDS = 1_000_000_000


def attach_sampler(program: int, sampler: Sampler, cookie: int = 0) -> Descriptors:
    """
    Attach a PERF_EVENT program to the clock or the counter of every CPU, in user space and in the kernel.

    Raise OSError with the kernel's error: ENOENT or EOPNOTSUPP if the machine does not have the counter.
    """
    if sampler.counter is None:
        period = _NANOSECONDS // sampler.number
        return CpuLinks(program, lambda cpu: perf_calls.open_cpu_clock(cpu, period), cookie)
    counter = counter_named(sampler.counter)
    return CpuLinks(
        program, lambda cpu: perf_calls.open_cpu_counter(cpu, counter.kind, counter.config, sampler.number), cookie
    )


KPROBE_REMEDY = "run as root; kernel lockdown may forbid kprobes as well"
"""Hint for kprobes that the kernel does not permit."""
_MANY = (Placement.ENTRY, Placement.ENTRY_RETURN)


def kernel_attach_type(placement: Placement) -> AttachType:
    """Return the attach type for loading a program for a place in the kernel."""
    return AttachType.TRACE_KPROBE_MULTI if placement in _MANY else AttachType.NONE


def attach_kernel(
    program: int, places: Sequence[tuple[int, int]], placement: Placement, refusals: dict[int, str] | None = None
) -> Descriptors:
    """
    Attach a BPF program to ``places``, pairs of an address in the kernel and a cookie.

    If ``refusals`` is not None, addresses that the kernel refuses are added to it with the reason; otherwise raise
    ``EngineError``.
    """
    if placement in _MANY:
        return _attach_functions(program, places, placement, refusals)
    links, address = Descriptors(), 0
    try:
        unit = perf_calls.kprobe_unit()
        for address, cookie in places:
            try:
                link_event(links, program, perf_calls.open_kprobe(unit, address, is_return=placement.is_return), cookie)
            except OSError as error:
                if refusals is None or error.errno not in _REASONS:
                    raise
                refusals[address] = _REASONS[error.errno]
    except BaseException as error:
        links.close()
        if isinstance(error, OSError):
            raise _kprobe_refusal(error, [address]) from error
        raise
    return links


def _attach_functions(
    program: int, places: Sequence[tuple[int, int]], placement: Placement, refusals: dict[int, str] | None
) -> Descriptors:
    """
    Attach a BPF program to kernel functions by one link of type kprobe_multi.

    ``places`` has pairs of an address and a cookie. If the kernel refuses single addresses, they are left out and added
    to ``refusals`` with the reason. If ``refusals`` is None, a refusal raises an error.
    """
    addresses = [address for address, _ in places]
    flags = KprobeMulti.RETURN if placement.is_return else KprobeMulti.NONE
    try:
        return Descriptors((link_kprobes(program, addresses, [cookie for _, cookie in places], flags),))
    except OSError as error:
        if refusals is None or error.errno not in _REASONS:
            raise _kprobe_refusal(error, addresses) from error
    refusals |= _refused_by_ftrace(addresses)
    kept = [(address, cookie) for address, cookie in places if address not in refusals]
    return _attach_functions(program, kept, placement, None) if kept else Descriptors()


class EntryKprobes:
    """
    Kprobe events at the entries of functions, which run no BPF program until ``link``.

    At each hit the kernel runs kprobes first that were registered later at the same function (``add_new_kprobe`` in
    kernel/kprobes.c).
    """

    def __init__(self, places: Sequence[tuple[int, int]]) -> None:
        self._events: list[tuple[int, int]] = []
        unit = perf_calls.kprobe_unit()
        for address, cookie in places:
            # The kernel refuses the function's return for the same reason, and that is reported.
            with contextlib.suppress(OSError):
                self._events.append((perf_calls.open_kprobe(unit, address), cookie))

    def link(self, program: int) -> Descriptors:
        """Attach a program to all open kprobe events, and return the links."""
        events, self._events = self._events, []
        return link_events(program, events, Descriptors())

    def close(self) -> None:
        """Close the events without a program."""
        while self._events:
            os.close(self._events.pop()[0])


def _refused_by_ftrace(addresses: Sequence[int]) -> dict[int, str]:
    """
    Return the addresses of functions that the kernel refuses in a link with many functions, each with the reason.

    The kernel refuses a list as a whole. So this attaches an empty program to its halves, and repeats that.
    """
    found: dict[int, str] = {}
    program = load(
        finished(Assembler()), {}, ProgramType.KPROBE, attach_type=AttachType.TRACE_KPROBE_MULTI, name="trial"
    )
    waiting = [addresses]
    try:
        while waiting:
            tried = waiting.pop()
            try:
                os.close(link_kprobes(program, tried, [0] * len(tried)))
            except OSError as error:
                if error.errno not in _REASONS:
                    raise _kprobe_refusal(error, tried) from error
                if len(tried) == 1:
                    found[tried[0]] = _REASONS[error.errno]
                else:
                    middle = len(tried) // 2
                    waiting += (tried[:middle], tried[middle:])
    finally:
        os.close(program)
    return found


EXCLUDED = "the kernel excludes it from probes: it is in code that handles probes, or outside code"
"""Reason for EINVAL, which the kernel returns for several properties of a place."""

_REASONS = {
    errno.EILSEQ: "it is inside an instruction",
    errno.EINVAL: EXCLUDED,
    errno.EADDRNOTAVAIL: "it is not in a function that may be probed",
    errno.ENOENT: "it is not in a function that may be probed",
    errno.ESRCH: "it is not in a function that may be probed",
    errno.EBUSY: "ftrace redirects it for another user, which cannot be changed",
    errno.EOPNOTSUPP: "the kernel cannot execute this instruction elsewhere",
}
"""Meaning of the kernel's errors that are due to the place (``register_kprobe``, ``check_kprobe_address_safe``)."""


def _kprobe_refusal(error: OSError, addresses: Sequence[int]) -> EngineError:
    what = _what(addresses)
    problem = f"{what} in the kernel cannot be attached: {_REASONS.get(error.errno or 0) or reason_of(error)}"
    return refused(error, problem, f"the kernel does not permit {what}", KPROBE_REMEDY)
