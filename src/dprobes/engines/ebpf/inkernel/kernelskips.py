"""
Functions of the kernel that a handler skips: which of them the kernel lets be skipped, and how.

Where its source says of a function that it may fail (ALLOW_ERROR_INJECTION), a program at a kprobe can override its
return. Where security modules decide, a program at a BPF trampoline can decide as well, with any value but 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.lower.request import Placement
from dprobes.diagnostics import Note
from dprobes.engines.ebpf.kernel.features import Feature
from dprobes.errors import TargetError
from dprobes.resolve.probestate import ProbeState
from dprobes.rpn.needs import skipping_instruction
from dprobes.rpn.program import Glob

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics
    from dprobes.engines.ebpf.kernel.features import Features
    from dprobes.resolve.kernelplaces import ResolvedKernel
    from dprobes.resolve.probepoints import Probepoint
    from dprobes.rpn.program import Program

__all__ = ["is_overridden", "refuse_skips"]

_LIST = "/sys/kernel/debug/error_injection/list"
_SKIPPABLE = (
    f"with CONFIG_BPF_KPROBE_OVERRIDE those in {_LIST} can be skipped, and with BPF trampolines those in which "
    "security modules decide (security_file_open)"
)


def refuse_skips(program: Program, resolved: ResolvedKernel, features: Features, diagnostics: Diagnostics) -> None:
    """Add an error for each ``skip`` of a function that the kernel lets nobody skip."""
    from dprobes.engines.ebpf.kernel.trampolinelinks import is_refused

    for probe in resolved.in_code:
        definition = probe.definition
        if probe.state is not ProbeState.COMPILED or (skip := skipping_instruction(program, definition)) is None:
            continue
        if isinstance(definition.location, Glob):
            diagnostics.error(
                definition.span("offset"),
                "a pattern cannot be skipped: the kernel says of each function whether it may be",
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
            refused = True  # it has no type
        if refused:
            diagnostics.error(skip.span, f"the kernel lets nobody skip '{probe.where}'", hint=_SKIPPABLE)
            continue
        diagnostics.note(
            skip.span, f"this kernel lets '{probe.where}' be skipped with other values than 0: with 0 it is executed"
        )


def is_overridden(probe: Probepoint, resolved: ResolvedKernel, features: Features) -> bool:
    """Return whether a kprobe can let the function of a probepoint return at once, as far as is known."""
    if Feature.OVERRIDE_RETURN not in features or Feature.KPROBE not in features:
        return False
    skippable = resolved.module.kernel.skippable
    return skippable is None or probe.where in skippable
