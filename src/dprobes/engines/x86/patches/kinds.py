"""
Kinds of instructions: what becomes of control behind them, and which cannot be executed at another address.

A kind is that of iced's code of an instruction, and is looked up once for each code.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from iced_x86 import Instruction

__all__ = ["Kind", "kind_of", "legacy_prefixes", "undisplaceable"]

_LEGACY_PREFIXES = b"\x66\x67\xf2\xf3\xf0\x2e\x36\x3e\x26\x64\x65"
_OPERAND_SIZE = 0x66
_KERNEL_ENTRY = b"\xcd\x80"
"""The software interrupt that calls the kernel, of 64-bit code as well."""


@dataclass(frozen=True, slots=True)
class Kind:
    """
    Say what an instruction does to control.

    It ``leaves`` if what follows is not executed after it, or only when a call returns, which it then ``calls``.
    ``is_branch`` is whether it names an address of code, or has one in an operand, and ``obstacle`` why it cannot be
    executed elsewhere, as a clause about ``it``.
    """

    leaves: bool = False
    calls: bool = False
    is_branch: bool = False
    is_system_call: bool = False
    obstacle: str | None = None


@functools.cache
def kind_of(code: int) -> Kind:
    """Return the kind of the instructions with a code."""
    from iced_x86 import FlowControl, Instruction, Mnemonic

    instruction = Instruction()
    instruction.code = code  # type: ignore[assignment]
    flow, mnemonic = instruction.flow_control, instruction.mnemonic
    if mnemonic == Mnemonic.INVALID:
        return Kind(leaves=True, obstacle="it is not a valid instruction")
    if mnemonic == Mnemonic.SYSENTER:
        return Kind(is_system_call=True, obstacle="it enters the kernel and comes back elsewhere")
    if mnemonic in (Mnemonic.SYSCALL, Mnemonic.INT):
        return Kind(is_system_call=True)
    if flow == FlowControl.INTERRUPT:
        return Kind(obstacle="it is a software interrupt")
    if instruction.is_call_far or instruction.is_call_far_indirect:
        return Kind(leaves=True, calls=True, obstacle="it is a far call, which pushes the address of its copy")
    leaving = (
        FlowControl.UNCONDITIONAL_BRANCH, FlowControl.INDIRECT_BRANCH, FlowControl.RETURN, FlowControl.EXCEPTION,
    )  # fmt: skip
    calls = instruction.is_call_near or instruction.is_call_near_indirect
    branches = (
        FlowControl.UNCONDITIONAL_BRANCH, FlowControl.CONDITIONAL_BRANCH, FlowControl.INDIRECT_BRANCH,
        FlowControl.XBEGIN_XABORT_XEND,
    )  # fmt: skip
    return Kind(leaves=flow in leaving or calls, calls=calls, is_branch=flow in branches or calls)


def undisplaceable(instruction: Instruction, raw: bytes) -> str | None:
    """Return why an instruction cannot be executed elsewhere, as a clause about ``it``; None if it can."""
    kind = kind_of(instruction.code)
    if kind.is_branch and raw[0] in _LEGACY_PREFIXES and _OPERAND_SIZE in raw[: legacy_prefixes(raw)]:
        return "it is a branch with an operand-size prefix, which processors understand differently"
    if kind.is_system_call and raw[0] == _KERNEL_ENTRY[0] and raw != _KERNEL_ENTRY:
        return "it is a software interrupt"
    return kind.obstacle


def legacy_prefixes(raw: bytes) -> int:
    """Return how many legacy prefixes an instruction begins with."""
    return len(raw) - len(raw.lstrip(_LEGACY_PREFIXES))
