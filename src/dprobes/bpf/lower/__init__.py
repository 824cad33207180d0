"""
RPN to eBPF, without LLVM: one template for each row of the instruction table writes eBPF through a writer.

The code passes the verifier by construction; ``template_writer`` has the rules. The main one: between blocks of RPN the
*state* of a handler is in an element of a map. A value loaded from a map is an unknown number to the verifier, so two
paths to a block never differ, nothing is unrolled, and verification is linear. The input is the encoded bytes, as the
interpreter runs them, so that a damaged compiled file behaves the same in both.

* A state is claimed by an atomic exchange; states are not per CPU, because handlers sleep and are preempted. A handler
  that needs little of the state has it on its stack, if possible: then a hit claims no state.
* The ELF note of a USDT probe's site specifies where an argument is; ``vm.world_rules`` defines its value.
* Every backward jump passes a *guard* at its target: ``may_goto``, an open-coded iterator, or a return into
  ``bpf_loop``, whichever the kernel has. With guards 200 dense labels cost the verifier 1.8 times their instructions.
* ``hosts`` has the kernel interface of handlers. Tests replace it, and ``BPF_PROG_TEST_RUN`` runs the same bytes on a
  synthetic ``pt_regs``: so every case and random programs are compared with the interpreter.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers assume True
if TYPE_CHECKING:
    from dprobes.bpf.lower.composer import Composer
    from dprobes.bpf.lower.lowered_handler import check_lowering, host_of, is_supported, lower, lower_for_word_sizes
    from dprobes.bpf.lower.lowering_request import (
        Abilities,
        Filter,
        LoopForm,
        Lowered,
        MappedModule,
        Placement,
        Request,
        Tables,
        VmaLayout,
        Watched,
    )

__all__ = [
    "Abilities",
    "Composer",
    "Filter",
    "LoopForm",
    "Lowered",
    "MappedModule",
    "Placement",
    "Request",
    "Tables",
    "VmaLayout",
    "Watched",
    "check_lowering",
    "host_of",
    "is_supported",
    "lower",
    "lower_for_word_sizes",
]

_HOMES = {
    "composer": ("Composer",),
    "lowered_handler": ("check_lowering", "host_of", "is_supported", "lower", "lower_for_word_sizes"),
}
"""Modules of the names that ``lowering_request`` does not have; each is imported when one of its names is used."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from importlib import import_module

    home = next((module for module, names in _HOMES.items() if name in names), "lowering_request")
    value: object = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
