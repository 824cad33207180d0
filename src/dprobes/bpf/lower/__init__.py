"""
RPN to eBPF, one template for each row of the instruction table.

The code passes the verifier by construction; ``writer`` has the rules. What is lowered are the encoded bytes, as the
interpreter runs them, so that a damaged compiled file does the same in both.
"""

from __future__ import annotations

TYPE_CHECKING = False  # what type checkers take for true
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
