"""Output of ``show --bpf``: the eBPF code of handlers, next to their RPN instructions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.bpf.bpf_disassembler import disassemble
from dprobes.bpf.lower import Placement, Request, lower
from dprobes.engines.ebpf.attach.handler_objects import basic_request
from dprobes.engines.ebpf.ebpf_engine import EbpfEngine
from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features
from dprobes.errors import NotSupportedError, SourceError
from dprobes.platform.linux.procfs import missing_privilege
from dprobes.record.log_record import Item
from dprobes.rpn.instruction_encoding import encode
from dprobes.rpn.program_text import print_header, print_instruction
from dprobes.rpn.rpn_program import Address, Point, Sampler, Tracepoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dprobes.bpf.lower import Lowered
    from dprobes.engines.ebpf.attach.site_spec import Site
    from dprobes.resolve.local_module import ResolvedProgram
    from dprobes.rpn.instruction_encoding import CodeImage
    from dprobes.rpn.rpn_program import ProbeDefinition
    from dprobes.source_text import Span

__all__ = ["ebpf_listing"]

_ASSUMED = (Feature.MAY_GOTO, Feature.SLEEPABLE_UPROBE)
"""Features that the listing assumes if this user may not load BPF programs."""

_PROCESSORS = ("i386", "x86_64")


def ebpf_listing(compiled: ResolvedProgram) -> Iterator[str]:
    """
    Iterate over the lines of a listing of a program's handlers in eBPF, each instruction after its RPN instruction.

    Raise ``NotSupportedError`` for a processor without eBPF.
    """
    target = compiled.architecture
    if target.name not in _PROCESSORS:
        raise NotSupportedError(f"handlers are compiled to eBPF for {' and '.join(_PROCESSORS)}, not for {target.name}")
    program, resolved = compiled.program, compiled.resolved
    features, remark = _features()
    yield from print_header(program)
    yield f"// {target.name}, {target.word_size}-byte words; {remark}"
    image = resolved.image if resolved is not None else encode(program, target)
    # Without the module the addresses of its symbols are unknown.
    symbols = dict(resolved.symbols) if resolved is not None else {r.symbol: 0 for r in image.relocations}
    basic = replace(basic_request(features, program), symbols=symbols)
    sites, refusals = _sites(compiled, features)
    for number, definition in enumerate(program.definitions):
        yield ""
        yield from print_header(definition)
        request = _request(definition, basic, sites.get(number))
        point = Point.of(program, definition, 0)
        try:
            lowered = lower(image, target, image.handlers[number], point, request)
        except NotSupportedError as error:
            yield f"// not compiled: {error.message}"
            continue
        yield from _handler(lowered, image)
    for refusal in refusals:
        yield ""
        yield f"// not inserted by the ebpf engine: {refusal}"


def _features() -> tuple[Features, str]:
    """Return the features of this kernel, or the assumed ones, and a description for the listing."""
    missing = missing_privilege()
    if missing is None:
        return Features(), "for this kernel"
    assumed = Features(overrides={feature: feature in _ASSUMED for feature in Feature})
    names = ", ".join(feature.name.lower() for feature in _ASSUMED)
    return assumed, f"for a kernel with {names}: {missing}, so nothing was tried"


def _sites(compiled: ResolvedProgram, features: Features) -> tuple[Mapping[int, Site], list[str]]:
    """Return the first site of each definition, keyed by its number, and the engine's errors for the program."""
    if compiled.resolved is None:
        return {}, []
    try:
        plan = EbpfEngine(features=features).plan_file(compiled.program, compiled.resolved, compiled.diagnostics)
    except SourceError as error:
        return {}, [diagnostic.message for diagnostic in error.diagnostics]
    found: dict[int, Site] = {}
    for probe, sites in plan.probes:
        for site in sites:
            found.setdefault(probe.number, site)
    return found, []


def _request(definition: ProbeDefinition, basic: Request, site: Site | None) -> Request:
    is_glob = definition.has_many_places
    request = replace(
        basic,
        items=Item.MAJOR | Item.MINOR | (Item.IP if is_glob else Item(0)),
        probe=None if is_glob else 0,
        passcount=definition.passcount,
        maxhits=definition.maxhits,
    )
    if isinstance(definition.location, Tracepoint):
        return replace(request, placement=Placement.TRACEPOINT)
    if isinstance(definition.location, (Address, Sampler)):
        return replace(request, placement=Placement.EVENT)
    if site is not None:
        return replace(request, placement=site.placement, moved=site.moved, return_bytes=site.return_bytes)
    return replace(request, placement=Placement.RET_SITE if definition.at_return else Placement.BREAKPOINT)


def _handler(lowered: Lowered, image: CodeImage) -> Iterator[str]:
    assembled = lowered.assembled
    sleeps = ", may sleep" if lowered.sleepable else ""
    yield f"// eBPF: {len(assembled.code)} instructions, {lowered.state.size} bytes of scratch memory{sleeps}"
    strings = {offset: f"{offset:04x}  {print_instruction(i)}{_place(i.span)}" for offset, i in image.instructions}
    origin = None
    for line in disassemble(assembled.code, {reference.index: reference.map for reference in assembled.maps}):
        if assembled.origins[line.index] != origin:
            origin = assembled.origins[line.index]
            yield f"; {strings.get(origin, 'around the handler' if origin < 0 else f'{origin:04x}  no instruction')}"
        yield f"{line.index:6}: {line.text}"


def _place(span: Span | None) -> str:
    return f"  // line {span.line}" if span is not None else ""
