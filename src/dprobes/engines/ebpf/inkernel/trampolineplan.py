"""
The probepoints that BPF trampolines serve: those of kernels without kprobes, and of functions that are to be skipped.

A trampoline is where a function begins, or behind its return, and knows the function's arguments and its result. The
kernel finds functions by the names in its type information (BTF), so a name must be of one function only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.lower.request import ARGUMENT_REGISTERS, Placement
from dprobes.engines.ebpf.attach.siteplan import Site
from dprobes.engines.ebpf.kernel.features import Feature
from dprobes.errors import TargetError
from dprobes.resolve.probepoints import LeftOutProbe
from dprobes.rpn.isa import Group
from dprobes.rpn.needs import ENTRY, executed_instructions
from dprobes.rpn.program import Glob

if TYPE_CHECKING:
    from dprobes.arch import Architecture
    from dprobes.diagnostics import Diagnostics
    from dprobes.engines.ebpf.kernel.features import Features
    from dprobes.resolve.kernelplaces import ResolvedKernel
    from dprobes.resolve.probepoints import Probepoint
    from dprobes.rpn.program import Instruction, Program
    from dprobes.source import Span
    from dprobes.target.btf import Signature

__all__ = ["TrampolinePlan", "replaces_kprobes"]

_ALWAYS = ("eip",)
"""What every trampoline knows besides: the function's address."""


def replaces_kprobes(features: Features) -> bool:
    """Return whether trampolines serve all that kprobes would: this kernel has none of those."""
    return Feature.KPROBE not in features and Feature.TRAMPOLINE in features


class TrampolinePlan:
    """A plan for a program; what is wrong is added to ``diagnostics``, but for what patterns match."""

    def __init__(
        self, program: Program, resolved: ResolvedKernel, features: Features, diagnostics: Diagnostics
    ) -> None:
        self._program = program
        self._resolved = resolved
        self._features = features
        self._diagnostics = diagnostics
        self.left_out: list[LeftOutProbe] = []

    def site(self, probe: Probepoint, placement: Placement) -> tuple[Site, ...]:
        """Return the site of a probepoint; none if there can be none, which has been said then."""
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
        """Return what the function of a probepoint takes; raise ``TargetError`` if a trampoline cannot be there."""
        module, name = self._resolved.module, probe.where
        if module.name:
            raise TargetError(
                f"without kprobes only functions of the kernel itself can carry a probe, none of '{module.name}'",
                hint="'dprobes doctor' says what this kernel has",
            )
        if "+" in name:
            raise TargetError(
                f"without kprobes a probe can only be where a function begins, or at its return, not at {name}",
                hint="'dprobes doctor' says what this kernel has",
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
        """Return the first instruction that pushes what a trampoline does not know, with the problem and a hint."""
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
            hint = "it knows the arguments that the function takes (arg0 to arg5), pc, and at its return retval"
            return instruction, problem, hint
        return None


def _pushed_register(instruction: Instruction, architecture: Architecture) -> str | None:
    """Return the name of the current context's register that an instruction pushes; None if it pushes none."""
    row, operand = instruction.row, instruction.operand
    reads_hit = row.group is Group.REGISTER and row.syntax.startswith("push r")
    if not (reads_hit or row.syntax == ENTRY) or not isinstance(operand, (int, str)):
        return None
    register = architecture.register(operand)
    return register.name if register is not None else None


def _count(words: int) -> str:
    return "1 argument" if words == 1 else f"{words} arguments"
