"""What an instruction of a processor does: the processors that it is known of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple
from dprobes.target.code.effects.aarch64 import aarch64_effect
from dprobes.target.code.effects.power import power_effect
from dprobes.target.code.effects.riscv import riscv_effect
from dprobes.target.code.effects.zseries import zseries_effect

if TYPE_CHECKING:
    from dprobes.target.code.effects.effect import Effect

__all__ = ["MODES", "Mode", "effect_of"]


class Mode(NamedTuple):
    """What bits of a register have to be, so that instructions do what is said of them here."""

    register: str
    mask: int
    value: int


MODES = {
    "aarch64": (Mode("pstate", 0xC00, 0),),  # BTYPE: behind an indirect branch some instructions are refused
    "riscv64": (),
    "ppc": (),
    "ppc64": (),
    "s390x": (Mode("pswmask", 0x1_8000_0000, 0x1_8000_0000),),  # 64-bit addresses
}
"""The processors whose instructions are known, and how they have to be set up."""


def effect_of(machine: str, raw: bytes, address: int) -> Effect | None:
    """Return what the instruction ``raw`` of a processor does at an address, None if that is not known."""
    match machine:
        case "aarch64":
            return aarch64_effect(raw, address)
        case "riscv64":
            return riscv_effect(raw, address)
        case "ppc" | "ppc64":
            return power_effect(raw, 8 if machine == "ppc64" else 4)
        case "s390x":
            return zseries_effect(raw, address)
    return None
