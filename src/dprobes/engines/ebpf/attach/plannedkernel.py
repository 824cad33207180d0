"""
How the probepoints in the kernel are to be served: by ftrace where a function begins, by kprobes elsewhere.

A call of ftrace costs a hit less than a breakpoint, and one link takes thousands of functions. It saves only the
registers that functions take arguments in (``ftrace_regs``), so a handler that asks for others gets a kprobe, which has
all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.lower.request import Placement
from dprobes.engines.ebpf.attach.siteplan import Site
from dprobes.engines.ebpf.kernel.features import Feature
from dprobes.errors import reason_of
from dprobes.lazydataclass import dataclass
from dprobes.resolve.probestate import ProbeState
from dprobes.rpn.isa import Group
from dprobes.rpn.program import Glob

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.diagnostics import Diagnostics
    from dprobes.engines.ebpf.attach.conflicts import Conflict
    from dprobes.engines.ebpf.kernel.features import Features
    from dprobes.resolve.kernelplaces import ResolvedKernel
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint
    from dprobes.rpn.program import ProbeDefinition, Program

__all__ = ["PlannedKernel", "plan_kernel", "refuse_reading"]

_SAVED_BY_FTRACE = frozenset({"eax", "ecx", "edx", "esi", "edi", "r8", "r9", "esp", "eip"})
"""The registers in every ``ftrace_regs`` of x86-64 (arch/x86/include/asm/ftrace.h)."""

_READING = ("push mem", "log mrf", "log str", "vfyr")
"""How the instructions begin that read memory."""


@dataclass(frozen=True, slots=True)
class PlannedKernel:
    """The kernel, or a module of it, with the sites of its probepoints; they are addresses."""

    resolved: ResolvedKernel
    probes: tuple[tuple[Probepoint, tuple[Site, ...]], ...]
    owner: str | None = None
    reached: str = ""

    @property
    def path(self) -> str:
        """What people call it."""
        return str(self.resolved.module.path)

    @property
    def left_out(self) -> Sequence[LeftOutProbe]:
        """What matches a pattern and has no probepoint."""
        return self.resolved.left_out

    def conflicts(self) -> Iterator[Conflict]:
        """Give nothing: the kernel's code is the same for all, and was read where it is."""
        yield from ()

    def original(self) -> None:
        """Return None: the kernel's code is in no file that processes map."""
        return


def plan_kernel(program: Program, resolved: ResolvedKernel, features: Features) -> PlannedKernel:
    """Return how the probepoints of a program in the kernel are to be served."""
    has_many = Feature.KPROBE_MULTI in features
    kernel = resolved.module.kernel
    by_ftrace = {
        number: has_many and _asks_for_saved_registers(program, definition, resolved)
        for number, definition in enumerate(program.definitions)
    }

    def site(probe: Probepoint) -> tuple[Site, ...]:
        if probe.state is not ProbeState.COMPILED:
            return ()
        address = probe.instruction.address
        is_traceable = kernel.is_traceable(address) if "+" not in probe.where else False
        # Where it is not known, what a pattern matches is tried: a kprobe for each function would take too long.
        many = by_ftrace[probe.number] and (_is_pattern(probe) if is_traceable is None else is_traceable)
        if probe.at_return:
            placement = Placement.ENTRY_RETURN if many else Placement.KRETPROBE
        else:
            placement = Placement.ENTRY if many else Placement.KPROBE
        return (Site(address, placement, placement.value, may_fault=False),)

    return PlannedKernel(resolved, tuple((probe, site(probe)) for probe in resolved.in_code))


def refuse_reading(program: Program, features: Features, diagnostics: Diagnostics) -> None:
    """Add an error for the first instruction that reads memory, if this kernel lets no program read its own."""
    reading = (
        instruction
        for code in program.bodies()
        for instruction in code.instructions
        if instruction.row.syntax.startswith(_READING)
    )
    first = next(reading, None)
    if first is not None and (error := features.error(Feature.READ_KERNEL)) is not None:
        diagnostics.error(
            first.span,
            f"the ebpf engine cannot read the kernel's memory here: {Feature.READ_KERNEL.value}: {reason_of(error)}",
            hint="kernel lockdown must be 'none' or 'integrity' (/sys/kernel/security/lockdown)",
        )


def _is_pattern(probe: Probepoint) -> bool:
    return isinstance(probe.definition.location, Glob)


def _asks_for_saved_registers(program: Program, definition: ProbeDefinition, resolved: ResolvedKernel) -> bool:
    """Return whether a handler, with whatever it may call, reads only registers that ftrace saves."""
    for code in (definition.handler, *(procedure.code for procedure in program.procedures)):
        for instruction in code.instructions:
            if instruction.row.group is not Group.REGISTER or not instruction.row.syntax.startswith("push r"):
                continue
            if not isinstance(instruction.operand, (int, str)):
                return False
            register = resolved.architecture.register(instruction.operand)
            if register is not None and register.name not in _SAVED_BY_FTRACE and register.memory_offset is None:
                return False
    return True
