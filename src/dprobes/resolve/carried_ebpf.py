"""The eBPF of handlers in a compiled file, for each processor and each form of loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.arch import architecture
from dprobes.bpf.bpf_instructions import INSN_SIZE
from dprobes.bpf.bpf_instructions import encode as encode_insns
from dprobes.bpf.lower import Abilities, LoopForm, Placement, Request, lower
from dprobes.errors import NotSupportedError
from dprobes.ppdf.code_images import HOSTS
from dprobes.ppdf.ppdf_model import EbpfCode, EbpfMap
from dprobes.record.log_record import Item
from dprobes.resolve.kernel_places import KERNEL_CODE
from dprobes.resolve.probepoints import Space, space_of
from dprobes.rpn.instruction_encoding import encode
from dprobes.rpn.program_needs import (
    entry_instructions,
    executed_instructions,
    shared_tables,
    traced_fields,
    usdt_arguments,
)
from dprobes.rpn.rpn_program import ModuleType, Point, Sampler, Tracepoint, Usdt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.rpn.rpn_program import ProbeDefinition, Program

__all__ = ["EBPF_MAX", "INSTRUCTIONS_MAX", "ebpf_codes"]

EBPF_MAX = 1 << 20
"""Maximum size in bytes of the code in a compiled file: people read it, and compiling thousands of handlers is slow."""

INSTRUCTIONS_MAX = 5000
"""Maximum number of instructions of a handler whose code is carried."""


def ebpf_codes(program: Program, machines: Sequence[str]) -> tuple[EbpfCode, ...]:
    """
    Return the eBPF of all handlers, for the processors whose kernels the ebpf engine supports.

    Values that depend on a kernel or a process are missing in it: maps have their names, and symbols the address 0.
    """
    return tuple(_codes(program, machines))


_TOO_MUCH = f"a file carries {EBPF_MAX >> 20} MiB of eBPF, and there is more"
_TOO_LONG = f"a file carries the eBPF of handlers of up to {INSTRUCTIONS_MAX} instructions"


def _codes(program: Program, machines: Sequence[str]) -> Iterator[EbpfCode]:
    left = EBPF_MAX
    for machine in (name for name in machines if name in HOSTS):
        target = architecture(machine)
        image = encode(program, target)
        symbols = {relocation.symbol: 0 for relocation in image.relocations}
        for number, definition in enumerate(program.definitions):
            point = Point.of(program, definition, 0)
            omission = _omission(program, definition)
            for loops in LoopForm:
                if left <= 0:
                    yield EbpfCode(machine, number, loops.value, problem=_TOO_MUCH)
                    continue
                if omission is not None:
                    yield EbpfCode(machine, number, loops.value, problem=omission)
                    continue
                request = _request(program, definition, loops, symbols)
                try:
                    lowered = lower(image, target, image.handlers[number], point, request)
                except NotSupportedError as error:
                    yield EbpfCode(machine, number, loops.value, problem=error.message)
                    continue
                assembled = lowered.assembled
                left -= INSN_SIZE * len(assembled.code)
                yield EbpfCode(
                    machine,
                    number,
                    loops.value,
                    encode_insns(assembled.code),
                    tuple(EbpfMap(m.index, m.map.value, m.is_value) for m in assembled.maps),
                    assembled.origins,
                    lowered.state.size,
                    lowered.sleepable,
                )


def _omission(program: Program, definition: ProbeDefinition) -> str | None:
    """Return the reason why a handler's code is not carried, as a sentence; None if it is."""
    location = definition.location
    if isinstance(location, Tracepoint) and (location.is_system_call or traced_fields(program, definition)):
        return f"the fields of '{location}' are known only on the running kernel"
    if isinstance(location, Usdt) and usdt_arguments(program, definition):
        return f"the arguments of '{location}' are known only from the module's file"
    if definition.watches_ports:
        return "the port instructions are known only on the running kernel"
    if entry_instructions(program, definition):
        return "only the running engine can match a return with its entry"
    if isinstance(location, Sampler) and program.modtype is ModuleType.KMOD:
        return f"the code of '{program.name}' is known only on the running kernel"
    if sum(1 for _ in executed_instructions(program, definition)) > INSTRUCTIONS_MAX:
        return _TOO_LONG
    return None


def _request(program: Program, definition: ProbeDefinition, loops: LoopForm, symbols: dict[str, int]) -> Request:
    is_glob = definition.has_many_places
    in_kernel = space_of(program) is Space.KERNEL
    return Request(
        items=Item.MAJOR | Item.MINOR | (Item.IP if is_glob else Item(0)),
        abilities=Abilities(loops, writes_memory=True, writes_registers=True, overrides_returns=in_kernel),
        placement=_placement(definition, in_kernel=in_kernel),
        probe=None if is_glob else 0,
        symbols=symbols,
        passcount=definition.passcount,
        maxhits=definition.maxhits,
        vars=program.vars,
        gvars=program.gvars,
        cvars=program.cvars,
        tvars=program.tvars,
        shared_tables=shared_tables(program),
        in_kernel=in_kernel,
        reads_kernel=space_of(program) is Space.SYSTEM,
        kernel_code=KERNEL_CODE if in_kernel and isinstance(definition.location, Sampler) else None,
    )


def _placement(definition: ProbeDefinition, *, in_kernel: bool) -> Placement:
    """Return how the kernel calls a handler's eBPF code (``Placement``), independent of the kernel's version."""
    location = definition.location
    if isinstance(location, Tracepoint):
        return Placement.TRACEPOINT
    if not definition.is_in_code:
        return Placement.EVENT
    if in_kernel:
        return Placement.KRETPROBE if definition.at_return else Placement.KPROBE
    return Placement.RET_SITE if definition.at_return else Placement.BREAKPOINT
