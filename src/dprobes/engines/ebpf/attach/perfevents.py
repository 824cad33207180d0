"""
Probepoints that are perf events: samplers, which a clock on each CPU hits, and watchpoints, which debug registers hit.

A program belongs to one event probepoint. Where the code of one module is sampled, the program itself recognises it; an
address that is watched in every process runs the handler for the word size of whoever accesses it.
"""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.arch import architecture
from dprobes.bpf.lower import lower, lower_for_word_sizes
from dprobes.bpf.lower.request import Placement, Watched
from dprobes.diagnostics import Diagnostics
from dprobes.engines.ebpf.attach.handlers import check_handlers
from dprobes.engines.ebpf.attach.scope import is_initial_namespace
from dprobes.engines.ebpf.attach.siteplan import DEBUG_REGISTER
from dprobes.engines.ebpf.kernel.features import Feature
from dprobes.engines.ebpf.kernel.kerneltypes import KernelTypes
from dprobes.engines.ebpf.kernel.refusal import PERF_REMEDY
from dprobes.engines.ebpf.kernel.vmas import FileIdentifier, mapped_module, vma_layout
from dprobes.engines.interface import Notice
from dprobes.errors import EngineError, PrivilegeError, SourceError, reason_of, reason_of_number
from dprobes.lazydataclass import dataclass
from dprobes.record.layout import Item
from dprobes.resolve.probepoints import ProbeKind
from dprobes.resolve.resolution import resolve_everywhere
from dprobes.rpn.checker import check
from dprobes.rpn.encoder import encode
from dprobes.rpn.point import Point
from dprobes.target.kernel.tracedfields import Source, entry_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dprobes.arch import Architecture
    from dprobes.bpf.lower.request import Lowered, MappedModule, Request, VmaLayout
    from dprobes.engines.ebpf.kernel.descriptors import Descriptors
    from dprobes.engines.ebpf.kernel.features import Features
    from dprobes.engines.interface import Event
    from dprobes.resolve.kernelplaces import ResolvedKernel
    from dprobes.resolve.probepoints import Probepoint, ResolvedModule
    from dprobes.rpn.encoder import CodeImage
    from dprobes.rpn.program import Program

__all__ = [
    "EventProbe",
    "attach_event",
    "events_everywhere",
    "events_in",
    "events_in_kernel",
    "lower_event",
    "refuse_events",
]

_NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class EventProbe:
    """
    Hold a probepoint that is an event, with the program's code for each word size that it runs in.

    ``module`` is the one whose code is sampled or whose memory is watched, and ``paths`` lead to its file, and to
    others with the same contents. ``kernel`` is what a program in the kernel is about.
    """

    probe: Probepoint
    forms: tuple[tuple[CodeImage, Architecture], ...]
    module: ResolvedModule | None = None
    paths: tuple[str, ...] = ()
    kernel: ResolvedKernel | None = None

    @property
    def executed(self) -> str:
        """What hits it, in the words of the summary."""
        match self.probe.kind:
            case ProbeKind.SAMPLER:
                return "clock"
            case ProbeKind.TRACEPOINT:
                return "tracepoint"
        return DEBUG_REGISTER

    @property
    def placement(self) -> Placement:
        """How its handler comes to run."""
        return Placement.TRACEPOINT if self.probe.kind is ProbeKind.TRACEPOINT else Placement.EVENT


def events_in(resolved: ResolvedModule, paths: tuple[str, ...]) -> tuple[EventProbe, ...]:
    """Return the samplers and watchpoints of a program for the file that ``paths`` lead to."""
    form = (resolved.image, resolved.architecture)
    return tuple(EventProbe(probe, (form,), resolved, paths) for probe in resolved.events)


def events_in_kernel(resolved: ResolvedKernel) -> tuple[EventProbe, ...]:
    """Return the samplers and watchpoints of a program in the kernel."""
    form = (resolved.image, resolved.architecture)
    return tuple(EventProbe(probe, (form,), kernel=resolved) for probe in resolved.events)


def events_everywhere(program: Program, request: Request) -> tuple[tuple[EventProbe, ...], list[Event]]:
    """
    Return the probepoints of a program that is about everything, and what the user should hear.

    ``request`` is what is asked for all handlers. Raise ``SourceError`` if it can run in code of no word size.
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
    """Compile what keeps the entry of a system call for the handler at its end."""
    from dprobes.bpf.lower import host_of
    from dprobes.bpf.lower.callentries import entry_program

    request = replace(base, placement=event.placement, probe=entry, traced=entry_of(event.probe.traced))
    ((_, arch),) = event.forms
    return entry_program(arch, request, host_of(request))


def lower_event(event: EventProbe, program: Program, entry: int, base: Request) -> Lowered:
    """Compile the handler of an event, whose entry in the probe table is ``entry``."""
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
        abilities=replace(base.abilities, vma=layout),
    )
    return lower(image, arch, start, point, request)


def _with_symbols(request: Request, resolved: ResolvedKernel) -> Request:
    return replace(request, symbols=dict(resolved.symbols), per_cpu=resolved.per_cpu)


def _sampled(resolved: ResolvedModule, paths: Sequence[str]) -> tuple[MappedModule, VmaLayout]:
    """Return how programs recognise the code of a module."""
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
    """Add an error for each event that this kernel, or the engine, cannot serve."""
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
    """Attach a loaded program to its event, on every CPU; return why if no debug register is left."""
    probe = event.probe
    if probe.kind is ProbeKind.TRACEPOINT:
        from dprobes.engines.ebpf.kernel.tracepointlinks import attach_tracepoint

        return attach_tracepoint(probe.traced, program)
    from dprobes.engines.ebpf.kernel.cpulinks import ACCESSES, attach_breakpoint, attach_clock

    try:
        if probe.kind is ProbeKind.SAMPLER:
            return attach_clock(program, 0, period=_NANOSECONDS // probe.clock.frequency)
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
            from dprobes.engines.ebpf.attach.hardwarebreakpoints import IN_USE

            return IN_USE
        raise EngineError(f"the kernel refuses the event of {probe.where}: {reason}") from error
