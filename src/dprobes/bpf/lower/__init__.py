"""
Lowering of RPN to eBPF, without LLVM: for each row of the instruction table, a template writes eBPF.

The code passes the verifier by construction; ``template_writer`` has the rules. The main rule: between blocks of RPN,
the *state* of a handler is in an element of a map. To the verifier, a value loaded from a map is an unknown number. So
two paths to a block never differ, nothing is unrolled, and verification takes linear time. The input is the encoded
bytes, as for the interpreter, so a damaged compiled file behaves the same in both.

* A state is claimed by an atomic exchange. States are not per CPU, because handlers sleep and are preempted. If a
  handler needs little of the state, the state is on its stack if possible, and a hit claims none.
* The ELF note of a USDT probe's site specifies the place of an argument. ``vm.world_rules`` defines its value.
* Every backward jump passes a *guard* at its target: ``may_goto``, an open-coded iterator, or a return into
  ``bpf_loop``, depending on the kernel. With guards, the verifier processes 1.8 times the instructions of 200 dense
  labels.
* ``hosts`` has the kernel interface of handlers. Tests replace it, and ``BPF_PROG_TEST_RUN`` runs the same bytes on a
  synthetic ``pt_regs``. So every case and random programs are compared with the interpreter.
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
"""
Modules of the names that ``lowering_request`` does not define.

A module is imported when one of its names is used.
"""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from importlib import import_module

    home = next((module for module, names in _HOMES.items() if name in names), "lowering_request")
    value: object = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
