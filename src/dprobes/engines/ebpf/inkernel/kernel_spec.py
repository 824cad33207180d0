"""
Placement of probepoints in the kernel: ftrace at the start of a function, kprobes elsewhere.

A hit by ftrace costs less than one by a breakpoint, and one link attaches to thousands of functions. Ftrace saves only
the registers of arguments (``ftrace_regs``). A handler that reads other registers gets a kprobe, which saves all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dprobes.bpf.lower.lowering_request import ARGUMENT_REGISTERS, Placement, PortFilter
from dprobes.diagnostics import Note
from dprobes.engines.ebpf.attach.site_spec import Site
from dprobes.engines.ebpf.kernel.kernel_features import Feature
from dprobes.errors import TargetError, reason_of
from dprobes.resolve.port_watchpoints import watched_ports
from dprobes.resolve.probepoints import LeftOutProbe, ProbeState
from dprobes.rpn.instruction_set import Group
from dprobes.rpn.program_needs import ENTRY, entry_registers, executed_instructions, skipping_instruction
from dprobes.rpn.rpn_program import Expression, Glob
from dprobes.target.kernel.kernel_copies import bare_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.arch import Architecture
    from dprobes.diagnostics import Diagnostics
    from dprobes.engines.ebpf.attach.code_mappers import Conflict
    from dprobes.engines.ebpf.kernel.kernel_features import Features
    from dprobes.resolve.kernel_places import ResolvedKernel
    from dprobes.resolve.probepoints import Probepoint
    from dprobes.rpn.rpn_program import Instruction, ProbeDefinition, Program
    from dprobes.source_text import Span
    from dprobes.target.btf import Signature
    from dprobes.target.code.port_instructions import PortAccess

__all__ = ["SINGLE_KPROBES_MAX", "PlannedKernel", "plan_kernel", "refuse_reading", "refuse_skips", "refuse_waiting"]

# A BPF program at a kprobe can override the return of a function that the kernel's source marks for error injection
# (ALLOW_ERROR_INJECTION). A BPF program at a trampoline can also override functions of security modules, with any value
# but 0.


_LIST = "/sys/kernel/debug/error_injection/list"
_SKIPPABLE = (
    f"with CONFIG_BPF_KPROBE_OVERRIDE those in {_LIST} can be skipped, and with BPF trampolines those in which "
    "security modules decide (security_file_open)"
)


def refuse_skips(program: Program, resolved: ResolvedKernel, features: Features, diagnostics: Diagnostics) -> None:
    """Add an error for each ``skip`` of a function that the kernel does not allow to be skipped."""
    from dprobes.engines.ebpf.kernel.bpf_links import is_refused

    for probe in resolved.in_code:
        definition = probe.definition
        if probe.state is not ProbeState.COMPILED or (skip := skipping_instruction(program, definition)) is None:
            continue
        if isinstance(definition.location, Glob):
            diagnostics.error(
                definition.span("offset"),
                "a pattern cannot be skipped: the kernel decides for each function",
                notes=(Note("'skip' is here", skip.span),),
                hint="write the name of one function",
            )
            return
        if is_overridden(probe, resolved, features):
            if resolved.module.kernel.skippable is None:
                diagnostics.note(
                    skip.span,
                    f"the kernel alone checks whether '{probe.where}' may be skipped: {_LIST} cannot be read",
                )
            continue
        try:
            refused = Feature.MODIFY_RETURN not in features or is_refused(
                Placement.MODIFY_RETURN, probe.where, features.types
            )
        except TargetError:
            refused = True  # the function has no BTF type
        if refused:
            diagnostics.error(skip.span, f"the kernel does not allow to skip '{probe.where}'", hint=_SKIPPABLE)
            continue
        diagnostics.note(
            skip.span, f"this kernel lets '{probe.where}' be skipped with other values than 0: with 0 it is executed"
        )


def is_overridden(probe: Probepoint, resolved: ResolvedKernel, features: Features) -> bool:
    """Return whether a kprobe can skip the function of a probepoint, or True if the kernel's list cannot be read."""
    if Feature.OVERRIDE_RETURN not in features or Feature.KPROBE not in features:
        return False
    skippable = resolved.module.kernel.skippable
    return skippable is None or bare_name(probe.where) in skippable


_ALWAYS = ("eip",)
"""Register that a trampoline has in addition to the arguments: the function's address."""


def replaces_kprobes(features: Features) -> bool:
    """Return whether BPF trampolines are used in place of kprobes, which this kernel does not have."""
    return Feature.KPROBE not in features and Feature.TRAMPOLINE in features


class TrampolinePlan:
    """
    Planner of the probepoints that BPF trampolines serve: on kernels without kprobes, and at functions to be skipped.

    A trampoline is executed at the start of a function or after its return, with the function's arguments and return
    value. The kernel finds functions by their names in BTF, so the name must be unique. The planner adds errors to
    ``diagnostics``, and functions that match a pattern but cannot be probed to ``left_out``.
    """

    def __init__(
        self, program: Program, resolved: ResolvedKernel, features: Features, diagnostics: Diagnostics
    ) -> None:
        self._program = program
        self._resolved = resolved
        self._features = features
        self._diagnostics = diagnostics
        self.left_out: list[LeftOutProbe] = []

    def site(self, probe: Probepoint, placement: Placement) -> tuple[Site, ...]:
        """Return the site of a probepoint. If it cannot have one, add an error and return an empty tuple."""
        try:
            signature = self._signature(probe)
        except TargetError as error:
            definition = probe.definition
            self._refuse(probe, definition.span("offset") or definition.span("address"), error.message, error.hint)
            return ()
        if (missing := self._missing_register(probe, placement, signature)) is not None:
            instruction, problem, hint = missing
            self._refuse(probe, instruction.span, problem, hint)
            return ()
        return (
            Site(
                probe.instruction.address,
                placement,
                placement.value,
                may_fault=False,
                arguments=min(signature.words, len(ARGUMENT_REGISTERS)),
            ),
        )

    def _refuse(self, probe: Probepoint, span: Span | None, problem: str, hint: str | None) -> None:
        if isinstance(probe.definition.location, Glob):
            self.left_out.append(LeftOutProbe(probe.number, probe.path, probe.where, problem))
        else:
            self._diagnostics.error(span, problem, hint=hint)

    def _signature(self, probe: Probepoint) -> Signature:
        """Return the signature of a probepoint's function; raise ``TargetError`` if it cannot have a trampoline."""
        module, name = self._resolved.module, bare_name(probe.where)
        if module.name:
            raise TargetError(
                f"without kprobes only functions of the kernel itself can carry a probe, none of '{module.name}'",
                hint="'dprobes doctor' shows what this kernel supports",
            )
        if "+" in name:
            raise TargetError(
                f"without kprobes a probe can only be where a function begins, or at its return, not at {name}",
                hint="'dprobes doctor' shows what this kernel supports",
            )
        if len(module.kernel.symbols.find(name, "")) > 1:
            raise TargetError(f"several functions are called '{name}': a trampoline would be in any of them")
        if module.kernel.is_traceable(probe.instruction.address) is False:
            raise TargetError(f"ftrace cannot redirect '{name}' (it is not among available_filter_functions)")
        signature = self._features.types.signature(name)
        if signature is None:
            raise TargetError(f"a trampoline cannot be in '{name}': it takes any number of arguments")
        return signature

    def _missing_register(
        self, probe: Probepoint, placement: Placement, signature: Signature
    ) -> tuple[Instruction, str, str] | None:
        """Return the first instruction that pushes a register without a value at trampolines, with message and hint."""
        architecture = self._resolved.architecture
        known = {*_ALWAYS, *ARGUMENT_REGISTERS[: signature.words]}
        if placement is Placement.FEXIT and signature.has_result:
            known.add("eax")
        for instruction in executed_instructions(self._program, probe.definition):
            name = _pushed_register(instruction, architecture)
            at_entry = instruction.row.syntax == ENTRY
            if name is None or (name in known and not (at_entry and name == "eax")):
                continue
            if name == "eax" and not at_entry and placement is Placement.FEXIT:
                problem = f"'{instruction}': '{probe.where}' returns nothing"
            elif name in ARGUMENT_REGISTERS:
                problem = f"'{instruction}': '{probe.where}' takes {_count(signature.words)} only"
            else:
                problem = f"'{instruction}': a trampoline does not know this register of the kernel"
            hint = "it provides the arguments that the function takes (arg0 to arg5), pc, and at its return retval"
            return instruction, problem, hint
        return None


def _pushed_register(instruction: Instruction, architecture: Architecture) -> str | None:
    """Return the name of the register that an instruction pushes from the current context, or None if it does not."""
    row, operand = instruction.row, instruction.operand
    reads_hit = row.group is Group.REGISTER and row.syntax.startswith("push r")
    if not (reads_hit or row.syntax == ENTRY) or not isinstance(operand, (int, str)):
        return None
    register = architecture.register(operand)
    return register.name if register is not None else None


def _count(words: int) -> str:
    return "1 argument" if words == 1 else f"{words} arguments"


SINGLE_KPROBES_MAX = 256
"""
Maximum number of functions of a pattern that get a kprobe each.

The kernel takes some 10 ms to attach a kprobe and 30 ms to remove it (6.1 in an emulated machine), because each step
waits for all CPUs. Removing many at the same time does not take less.
"""

_ENTRY_OF = {
    Placement.KRETPROBE: Placement.KPROBE,
    Placement.ENTRY_RETURN: Placement.ENTRY,
    Placement.FEXIT: Placement.FENTRY,
}
"""Placement that records the entry of a function whose return is probed."""

_SINGLE = (Placement.KPROBE, Placement.KRETPROBE, Placement.FENTRY, Placement.FEXIT)
"""Placements that are attached to each function separately."""

_SAVED_BY_FTRACE = frozenset({"eax", "ecx", "edx", "esi", "edi", "r8", "r9", "esp", "eip"})
"""Registers in every ``ftrace_regs`` of x86-64 (arch/x86/include/asm/ftrace.h)."""

_LANDING_PADS = (bytes.fromhex("f30f1efa"), bytes.fromhex("660f1f00"))
"""``endbr64``, and the NOP that replaces it in functions that are not indirectly called (gen_endbr_poison)."""

_READING = ("push mem", "log mrf", "log str", "vfyr")
"""Prefixes of the syntax of instructions that read memory."""


@dataclass(frozen=True, slots=True)
class PlannedKernel:
    """Kernel or kernel module, with the sites of its probepoints. Their offsets are addresses."""

    resolved: ResolvedKernel
    probes: tuple[tuple[Probepoint, tuple[Site, ...]], ...]
    owner: str | None = None
    reached: str = ""
    refused: tuple[LeftOutProbe, ...] = ()

    @property
    def path(self) -> str:
        """Name of the kernel or module for users."""
        return str(self.resolved.module.path)

    @property
    def left_out(self) -> Sequence[LeftOutProbe]:
        """Functions that match a pattern and have no probepoint."""
        return (*self.resolved.left_out, *self.refused)

    def conflicts(self) -> Iterator[Conflict]:
        """Yield nothing: the kernel's code is the same for all processes, and was read from memory."""
        yield from ()

    def original(self) -> None:
        """Return None: the kernel's code is in no file that processes map."""
        return


def plan_kernel(
    program: Program, resolved: ResolvedKernel, features: Features, diagnostics: Diagnostics
) -> PlannedKernel:
    """
    Return the sites of a program's probepoints in the kernel.

    Add an error if a pattern matches too many functions to attach to them one by one.
    """
    has_many = Feature.KPROBE_MULTI in features
    kernel = resolved.module.kernel
    trampolines = TrampolinePlan(program, resolved, features, diagnostics)
    has_kprobes = not replaces_kprobes(features)
    by_ftrace = {
        number: has_many
        and skipping_instruction(program, definition) is None
        and _asks_for_saved_registers(program, definition, resolved)
        for number, definition in enumerate(program.definitions)
    }

    def site(probe: Probepoint) -> tuple[Site, ...]:
        if probe.state is not ProbeState.COMPILED:
            return ()
        address = probe.instruction.address
        skips = skipping_instruction(program, probe.definition) is not None
        if skips and not is_overridden(probe, resolved, features):
            return trampolines.site(probe, Placement.MODIFY_RETURN)
        if probe.code.port is not None:
            placed = _waiting_site(probe, resolved, features) or Site(
                address, Placement.KPROBE, Placement.KPROBE.value, may_fault=False
            )
            return (placed._replace(ports=_port_filter(probe, probe.code.port)),)
        if not has_kprobes:
            return trampolines.site(probe, Placement.FEXIT if probe.at_return else Placement.FENTRY)
        is_traceable = kernel.is_traceable(address) if "+" not in probe.where else False
        # If it is unknown which functions ftrace supports, ftrace is tried for a pattern's functions: a kprobe for each
        # would take too long.
        many = by_ftrace[probe.number] and (_is_pattern(probe) if is_traceable is None else is_traceable)
        # In a loaded module, the functions of a pattern are one link; other probepoints are found again when it is
        # reloaded.
        is_linked = many and _is_pattern(probe) and resolved.module.is_loaded
        if not is_linked and (waiting := _waiting_site(probe, resolved, features)) is not None:
            return (waiting,)
        if probe.at_return:
            # For a link with one function the kernel provides for two pending returns per CPU, for a kprobe at least
            # ten (fprobe_init_rethook in kernel/trace/fprobe.c, register_kretprobe in kernel/kprobes.c).
            placement = Placement.ENTRY_RETURN if many and _is_pattern(probe) else Placement.KRETPROBE
        else:
            placement = Placement.ENTRY if many else Placement.KPROBE
        return (Site(address, placement, placement.value, may_fault=False),)

    def sites(probe: Probepoint) -> tuple[Site, ...]:
        found = site(probe)
        if not found or entry_registers(program, probe.definition, resolved.architecture) is None:
            return found
        placement = _ENTRY_OF[found[0].placement]
        return (found[0]._replace(placement=placement, executed=placement.value, is_entry=True), *found)

    probes = tuple((probe, sites(probe)) for probe in resolved.in_code)
    planned = PlannedKernel(resolved, probes, refused=tuple(trampolines.left_out))
    singles = Counter(
        probe.number
        for probe, sites in planned.probes
        if _is_pattern(probe) and any(site.placement in _SINGLE for site in sites)
    )
    for number, count in singles.items():
        if count > SINGLE_KPROBES_MAX:
            reason, hint = _reason_of_singles(resolved, has_many=has_many)
            what = "kprobes" if has_kprobes else "trampolines"
            diagnostics.error(
                program.definitions[number].span("offset"),
                f"{count} functions are too many for {what}, which are attached and removed one by one: {reason}",
                hint=hint,
            )
    return planned


def _port_filter(probe: Probepoint, access: PortAccess) -> PortFilter | None:
    """Return the filter of the hits at a port instruction, or None if each execution accesses the watched ports."""
    if access.port is not None:
        return None
    ports = watched_ports(probe.definition).ports_of(access.width)
    return PortFilter(ports[0], ports[-1], access.count_size)


def _reason_of_singles(resolved: ResolvedKernel, *, has_many: bool) -> tuple[str, str]:
    """Return the reason why each function of a pattern needs a kprobe of its own, and a hint."""
    fewer = f"use a pattern of at most {SINGLE_KPROBES_MAX} functions"
    if not has_many:
        return "this kernel has no kprobe_multi links", f"{fewer}, or a kernel with CONFIG_FPROBE (Linux 5.18)"
    if not resolved.module.is_loaded:
        return f"the module '{resolved.module.name}' is not loaded", f"load the module first, or {fewer}"
    return (
        "the handler reads registers that ftrace does not save, or ftrace is not known to reach them",
        "let it read those of arguments and the return value only (push r, arg0)",
    )


def _waiting_site(probe: Probepoint, resolved: ResolvedKernel, features: Features) -> Site | None:
    """Return the site, with an anchor, of a probepoint in a module that may be loaded later, or None if impossible."""
    module = resolved.module
    if not module.name:
        return None
    # Symbol addresses that handlers push are valid only while the module stays loaded.
    if module.is_loaded and (resolved.symbols or Feature.KPROBE_EVENTS not in features):
        return None
    address = probe.instruction.address
    code = module.kernel.text.read(address, len(_LANDING_PADS[0]))
    found = module.kernel.anchor(address, module.name) if code else None
    if found is None or (probe.at_return and found[1]):
        return None
    name, distance = found
    # At a function's beginning, the kernel places the probe after the landing pad of indirect calls, since Linux kernel
    # commit cc66bb914578 ("x86/ibt,kprobes: Cure sym+0 equals fentry woes") (in v5.18).
    moved = len(code) if not probe.at_return and "+" not in probe.where and code in _LANDING_PADS else 0
    placement = Placement.KRETPROBE if probe.at_return else Placement.KPROBE
    return Site(address, placement, placement.value, may_fault=False, moved=moved, anchor=f"{name}+{distance}")


def refuse_waiting(resolved: ResolvedKernel, features: Features, diagnostics: Diagnostics) -> None:
    """Add errors if this kernel cannot register kprobes when a module is loaded."""
    module = resolved.module
    if module.is_loaded:
        return
    error = features.error(Feature.KPROBE_EVENTS)
    for probe in resolved.in_code:
        if probe.state is not ProbeState.COMPILED:
            continue
        span = probe.definition.span("offset") or probe.definition.span("address")
        if error is not None:
            diagnostics.error(
                span,
                f"the ebpf engine cannot wait for the module '{module.name}', which is not loaded: this kernel has no "
                f"{Feature.KPROBE_EVENTS.value} ({reason_of(error)})",
                hint="load the module first",
            )
            return
        if _waiting_site(probe, resolved, features) is None:
            diagnostics.error(
                span,
                f"the ebpf engine cannot wait for {probe.where}: the kernel finds it by a unique "
                f"name, which it does not have in '{module.name}'",
                hint="load the module first",
            )


def refuse_reading(program: Program, resolved: ResolvedKernel, features: Features, diagnostics: Diagnostics) -> None:
    """Add an error for the first instruction that reads memory, if BPF programs may not read kernel memory."""
    copied = {name for name, address in resolved.symbols if address in resolved.per_cpu[1]}
    reading = (
        instruction
        for code in program.bodies()
        for instruction in code.instructions
        if instruction.row.syntax.startswith(_READING)
        or (isinstance(instruction.operand, Expression) and instruction.operand.symbol in copied)
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
    """Return whether a handler and all procedures read only registers that ``ftrace_regs`` has."""
    for code in (definition.handler, *(procedure.code for procedure in program.procedures)):
        for instruction in code.instructions:
            row = instruction.row
            reads_hit = row.group is Group.REGISTER and row.syntax.startswith("push r")
            if not reads_hit and row.syntax != ENTRY:
                continue
            if not isinstance(instruction.operand, (int, str)):
                return False
            register = resolved.architecture.register(instruction.operand)
            if register is not None and register.name not in _SAVED_BY_FTRACE and register.memory_offset is None:
                return False
    return True
