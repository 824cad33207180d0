"""
Probepoints that are perf events: samplers, hit by a clock or a counter of each CPU, and watchpoints.

A BPF program belongs to one probepoint. If the code of one module is sampled, the BPF program itself recognizes that
code. If an address is watched in every process, the BPF program runs the handler for the word size of the accessing
process.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dprobes.arch import architecture
from dprobes.bpf.lower import lower, lower_for_word_sizes
from dprobes.bpf.lower.lowering_request import Placement, Watched
from dprobes.diagnostics import Diagnostics
from dprobes.engines.ebpf.attach.handler_objects import check_handlers
from dprobes.engines.ebpf.attach.run_scope import is_initial_namespace
from dprobes.engines.ebpf.attach.site_spec import DEBUG_REGISTER
from dprobes.engines.ebpf.kernel.bpf_links import ACCESSES
from dprobes.engines.ebpf.kernel.bpf_objects import PERF_REMEDY, Descriptors
from dprobes.engines.ebpf.kernel.kernel_features import Feature, KernelTypes
from dprobes.engines.ebpf.kernel.task_structures import FileIdentifier, mapped_module, vma_layout
from dprobes.engines.engine_interface import Notice
from dprobes.errors import EngineError, PrivilegeError, SourceError, reason_of, reason_of_number
from dprobes.platform.linux import perf_calls
from dprobes.platform.linux.bpf_calls import link_perf_event
from dprobes.platform.linux.procfs import online_cpus
from dprobes.record.log_record import Item
from dprobes.resolve.local_module import resolve_everywhere
from dprobes.resolve.probepoints import ProbeKind, ProbeState, impossible_address
from dprobes.rpn.instruction_encoding import encode
from dprobes.rpn.program_checker import check
from dprobes.rpn.rpn_program import Point
from dprobes.target.kernel.traced_fields import Source, entry_of

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Sequence

    from dprobes.arch import Architecture
    from dprobes.bpf.lower.lowering_request import Lowered, MappedModule, Request, VmaLayout
    from dprobes.engines.ebpf.kernel.kernel_features import Features
    from dprobes.engines.engine_interface import Event
    from dprobes.platform.linux.perf_calls import Access
    from dprobes.resolve.kernel_places import ResolvedKernel
    from dprobes.resolve.probepoints import Probepoint, ResolvedModule, WatchedMemory
    from dprobes.rpn.instruction_encoding import CodeImage
    from dprobes.rpn.rpn_program import Program

__all__ = [
    "IN_USE",
    "EventProbe",
    "Watch",
    "attach_event",
    "events_everywhere",
    "events_in",
    "events_in_kernel",
    "lower_event",
    "refuse_events",
]

USER_END = (1 << 47) - 4096
"""First address beyond the user address space of x86-64 with four levels of page tables."""

IN_USE = "all debug registers of a CPU are in use"
"""Detail of DEBUGREG_UNAVAIL for ENOSPC."""

_NOWHERE = 0


class MovableBreakpoint(Descriptors):
    """
    A hardware breakpoint on ``size`` bytes, on all CPUs, that runs a PERF_EVENT program.

    It watches no memory until ``move``. To open a breakpoint on a CPU, the kernel waits for an RCU grace period
    (``percpu_down_write`` in ``kernel/events/hw_breakpoint.c``). That takes milliseconds, or forever if a process waits
    in a BPF program meanwhile. To move an open breakpoint takes microseconds.

    The constructor raises OSError with the kernel's error: ENOSPC if the four debug registers of a CPU are in use.
    ``program`` is a descriptor, which must stay open as long as CPUs may come online.
    """

    def __init__(self, program: int, size: int, access: Access) -> None:
        super().__init__()
        self._program = program
        self._size = size
        self._access = access
        self._address: int | None = None
        self._events: dict[int, tuple[int, int]] = {}
        """The descriptors of event and link, keyed by CPU."""
        try:
            for cpu in online_cpus():
                self.renew(cpu)
        except BaseException:
            self.close()
            raise

    def renew(self, cpu: int) -> None:
        """Open the breakpoint on a CPU that has come online. The old event there is inactive (``bpf_links``)."""
        for old in self._events.pop(cpu, ()):
            os.close(self.remove(old))
        try:
            event = self.add(perf_calls.open_breakpoint(_NOWHERE, self._size, self._access, cpu=cpu))
        except OSError as error:
            if error.errno == errno.ENODEV:
                return  # it has gone offline meanwhile
            raise
        self._events[cpu] = event, self.add(link_perf_event(self._program, event))
        if self._address is not None:
            perf_calls.move_breakpoint(event, self._address, self._size, self._access)

    def move(self, address: int) -> None:
        """Watch the memory at an address from now on; raise OSError with the kernel's error."""
        for event, _ in self._events.values():
            perf_calls.move_breakpoint(event, address, self._size, self._access)
        self._address = address

    def rest(self) -> None:
        """Disable the breakpoint on all CPUs. ``move`` enables it at another address."""
        self._address = None
        for event, _ in self._events.values():
            perf_calls.disable(event)


class Watch(Descriptors):
    """
    Hardware breakpoints of one watchpoint, one for each load bias.

    A spare one is open in advance for the next load bias (``prepare``). ``lock`` protects the attributes. ``close``
    closes the breakpoints and calls ``on_close``.
    """

    def __init__(
        self,
        number: int,
        memory: WatchedMemory,
        program: int,
        lock: threading.Lock,
        on_close: Callable[[], None],
    ) -> None:
        super().__init__()
        self.number = number
        self._memory = memory
        self._program = program
        self._lock = lock
        self._on_close = on_close
        self._placed: dict[int, MovableBreakpoint] = {}
        self._spare: MovableBreakpoint | None = None
        self.is_closed = False

    @property
    def is_absolute(self) -> bool:
        """True if the watched address is a number, the same in each process."""
        return self._memory.absolute

    def attach(self, bias: int) -> tuple[ProbeState, str] | None:
        """
        Watch the address for a load bias, unless it is watched already or the watchpoint is closed.

        Return None, or a state and the reason if the address cannot be watched. The caller holds the lock.
        """
        place = 0 if self._memory.absolute else bias
        if self.is_closed or place in self._placed:
            return None
        address = self._memory.address + place
        if address + self._memory.length > USER_END:
            return ProbeState.INVALID_OFFSET, impossible_address(address)
        try:
            if self._spare is None:
                self._spare = self._opened()
            self._spare.move(address)
            self._placed[place], self._spare = self._spare, None
        except OSError as error:
            reason = f"the kernel does not watch {address:#x}: {reason_of_number(error.errno or 0)}"
            return ProbeState.DEBUGREG_UNAVAIL, IN_USE if error.errno == errno.ENOSPC else reason
        return None

    def prepare(self) -> None:
        """Open a spare breakpoint for the next load bias, if a debug register is free. The caller holds the lock."""
        if self._spare is None and not self.is_closed and not self._memory.absolute:
            with contextlib.suppress(OSError):
                self._spare = self._opened()

    def _opened(self) -> MovableBreakpoint:
        return MovableBreakpoint(self._program, self._memory.length, ACCESSES[self._memory.access])

    def release(self, bias: int) -> None:
        """Stop watching the address for a load bias. The caller holds the lock."""
        if self._memory.absolute or (left := self._placed.pop(bias, None)) is None:
            return
        if self._spare is None:
            left.rest()
            self._spare = left
        else:
            left.close()

    def renew(self, cpu: int) -> None:
        """Open the breakpoints on a CPU that has come online; raise OSError with the kernel's error."""
        with self._lock:
            for each in (*self._placed.values(), *([self._spare] if self._spare is not None else ())):
                each.renew(cpu)

    def close(self) -> None:
        """Stop watching and close all breakpoints."""
        with self._lock:
            self.is_closed = True
            left = list(self._placed.values())
            if self._spare is not None:
                left.append(self._spare)
            self._placed.clear()
            self._spare = None
        for each in left:
            each.close()
        self._on_close()


@dataclass(frozen=True, slots=True)
class EventProbe:
    """
    Probepoint that is a perf event, with the encoded probe program for each word size of code in which it runs.

    ``module`` is the module whose code is sampled or whose memory is watched. ``paths`` lead to its file, and to files
    that share its pages. ``kernel`` is the target of a program in the kernel.
    """

    probe: Probepoint
    forms: tuple[tuple[CodeImage, Architecture], ...]
    module: ResolvedModule | None = None
    paths: tuple[str, ...] = ()
    kernel: ResolvedKernel | None = None

    @property
    def executed(self) -> str:
        """The cause of its hits for the summary, such as ``debug register``."""
        match self.probe.kind:
            case ProbeKind.SAMPLER:
                return "clock" if self.probe.sampler.counter is None else "counter"
            case ProbeKind.TRACEPOINT:
                return "tracepoint"
        return DEBUG_REGISTER

    @property
    def placement(self) -> Placement:
        """Placement of its handler."""
        return Placement.TRACEPOINT if self.probe.kind is ProbeKind.TRACEPOINT else Placement.EVENT


def events_in(resolved: ResolvedModule, paths: tuple[str, ...]) -> tuple[EventProbe, ...]:
    """Return the samplers and watchpoints of a program in a file; ``paths`` lead to it."""
    form = (resolved.image, resolved.architecture)
    return tuple(EventProbe(probe, (form,), resolved, paths) for probe in resolved.events)


def events_in_kernel(resolved: ResolvedKernel) -> tuple[EventProbe, ...]:
    """Return the samplers and watchpoints of a program in the kernel."""
    form = (resolved.image, resolved.architecture)
    return tuple(EventProbe(probe, (form,), kernel=resolved) for probe in resolved.events)


def events_everywhere(program: Program, request: Request) -> tuple[tuple[EventProbe, ...], list[Event]]:
    """
    Return the probepoints of a program without a module, and notices for the user.

    ``request`` has the properties of all handlers. Raise ``SourceError`` if the program cannot run in code of any word
    size.
    """
    forms: list[tuple[CodeImage, Architecture]] = []
    probes: tuple[Probepoint, ...] = ()
    notices: list[Event] = []
    refusal: SourceError | None = None
    for name in ("x86_64", "i386"):
        arch, diagnostics = architecture(name), Diagnostics()
        try:
            check(program, arch, diagnostics, allow_write=True)
            diagnostics.raise_if_errors()
            found = resolve_everywhere(program, arch, diagnostics)
            image = encode(program, arch)
            check_handlers(program, image, arch, diagnostics, request)
            diagnostics.raise_if_errors()
        except SourceError as error:
            refusal = refusal or error
            notices.append(Notice(f"the program cannot be inserted into {name} processes", details=error.message))
            continue
        forms.append((image, arch))
        probes = probes or found
    if refusal is not None and not forms:
        raise refusal
    return tuple(EventProbe(probe, tuple(forms)) for probe in probes), notices


# Code


def lower_entry(event: EventProbe, entry: int, base: Request) -> Lowered:
    """
    Compile the BPF program at the entry of a system call that keeps the registers for the handler of its return.

    ``entry`` is the index of the probepoint in the probe table, ``base`` has the properties that all handlers share.
    """
    from dprobes.bpf.lower import host_of
    from dprobes.bpf.lower.hits.call_entries import entry_program

    request = replace(base, placement=event.placement, probe=entry, traced=entry_of(event.probe.traced))
    ((_, arch),) = event.forms
    return entry_program(arch, request, host_of(request))


def lower_event(event: EventProbe, program: Program, entry: int, base: Request) -> Lowered:
    """
    Compile the handler of an event, whose entry in the probe table is ``entry``.

    ``base`` has the properties that all handlers of the program share.
    """
    probe, definition = event.probe, event.probe.definition
    request = replace(
        base,
        items=base.items | Item.IP if probe.kind is ProbeKind.SAMPLER else base.items,
        placement=event.placement,
        probe=entry,
        passcount=definition.passcount,
        maxhits=definition.maxhits,
    )
    is_watchpoint = probe.kind is ProbeKind.WATCHPOINT
    point = Point.of(program, definition, probe.memory.address if is_watchpoint else 0)
    if probe.kind is ProbeKind.TRACEPOINT:
        assert event.kernel is not None
        request = replace(request, traced=probe.traced)
        request = _with_symbols(request, event.kernel)
        ((image, arch),) = event.forms
        return lower(image, arch, image.handlers[probe.number], point, request)
    if event.kernel is not None:
        request = replace(
            request,
            in_kernel=True,
            kernel_code=None if is_watchpoint else event.kernel.module.code,
        )
        request = _with_symbols(request, event.kernel)
    if event.module is None:
        return lower_for_word_sizes(event.forms, probe.number, point, request)
    ((image, arch),) = event.forms
    start = image.handlers[probe.number]
    if is_watchpoint:
        watched = Watched.NUMBER if probe.memory.absolute else Watched.SYMBOL
        request = replace(request, watched=watched, link=probe.memory.address, symbols=dict(event.module.symbols))
        return lower(image, arch, start, point, request)
    module, layout = _sampled(event.module, event.paths)
    request = replace(
        request,
        module=module,
        symbols=dict(event.module.symbols),
        abilities=base.abilities._replace(vma=layout),
    )
    return lower(image, arch, start, point, request)


def _with_symbols(request: Request, resolved: ResolvedKernel) -> Request:
    return replace(request, symbols=dict(resolved.symbols), per_cpu=resolved.per_cpu)


def _sampled(resolved: ResolvedModule, paths: Sequence[str]) -> tuple[MappedModule, VmaLayout]:
    """
    Return the module, with the identities of all its files ``paths``, and the offsets in vm_area_struct.

    By these a BPF program decides whether an interrupted thread executes the module.
    """
    with KernelTypes() as types:
        layout = vma_layout(types)
    try:
        with FileIdentifier(layout) as identifier:
            return mapped_module(identifier, resolved.module.elf, paths), layout
    except OSError as error:
        raise EngineError(
            f"'{resolved.module.path}' cannot be mapped to see how the kernel identifies it: "
            f"{reason_of_number(error.errno or 0)}"
        ) from error


def refuse_events(
    probes: Iterable[Probepoint],
    features: Features,
    diagnostics: Diagnostics,
    *,
    everywhere: bool,
) -> None:
    """
    Add an error for each event that this kernel or the engine does not support.

    ``everywhere`` is True for events without a module.
    """
    for probe in probes:
        if probe.kind is ProbeKind.TRACEPOINT:
            is_record = probe.traced.source is Source.RECORD
            needed: tuple[Feature, ...] = (Feature.PERF_EVENT if is_record else Feature.TYPED_TRACEPOINT,)
            span, what = probe.definition.span("offset"), f"attach to {probe.where}"
        elif probe.kind is ProbeKind.SAMPLER:
            needed = (Feature.PERF_EVENT,) if everywhere else (Feature.PERF_EVENT, Feature.FIND_VMA, Feature.BTF)
            span, what = probe.definition.span("sampler"), "sample a module"
        else:
            needed = (
                (Feature.PERF_EVENT,)
                if everywhere
                else (Feature.PERF_EVENT, Feature.TYPED_TRACEPOINT, Feature.BPF_LOOP)
            )
            span, what = probe.definition.span("watchpoint"), "watch memory"
            if not everywhere and not is_initial_namespace():
                diagnostics.error(
                    span,
                    f"the ebpf engine cannot watch '{probe.where}' from within a PID namespace",
                    hint="use --engine ptrace with -c COMMAND or -p PID",
                )
                continue
        for feature in needed:
            if (error := features.error(feature)) is not None:
                reason = reason_of(error)
                diagnostics.error(
                    span, f"the ebpf engine cannot {what} here: this kernel has no {feature.value} ({reason})"
                )
                break


# Attachment


def attach_event(event: EventProbe, program: int) -> Descriptors | str:
    """
    Attach a loaded BPF program to its event, on every CPU, until the result is closed.

    Return the reason, a string, if all debug registers are in use; raise ``EngineError`` for other errors of the
    kernel.
    """
    probe = event.probe
    if probe.kind is ProbeKind.TRACEPOINT:
        from dprobes.engines.ebpf.kernel.bpf_links import attach_tracepoint

        return attach_tracepoint(probe.traced, program)
    from dprobes.engines.ebpf.kernel.bpf_links import attach_breakpoint, attach_sampler

    try:
        if probe.kind is ProbeKind.SAMPLER:
            return attach_sampler(program, probe.sampler)
        memory = probe.memory
        return attach_breakpoint(program, memory.address, memory.length, ACCESSES[memory.access])
    except OSError as error:
        reason = reason_of_number(error.errno or 0)
        if error.errno in (errno.EPERM, errno.EACCES):
            raise PrivilegeError(
                f"the kernel does not permit perf events to this process: {reason}",
                hint=PERF_REMEDY,
            ) from error
        if probe.kind is ProbeKind.WATCHPOINT and error.errno == errno.ENOSPC:
            return IN_USE
        raise EngineError(f"the kernel refuses the event of {probe.where}: {reason}") from error
