"""The faults that an instruction of x86 can raise: memory, division, privilege, and floating-point exceptions."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from iced_x86 import Instruction

__all__ = ["may_fault"]


def may_fault(raw: bytes, bits: int) -> bool:
    """
    Return whether the instruction ``raw`` in code of 32 or 64 ``bits`` can raise a fault that ends a program.

    False is certain; true may be said of one that never does, as of all vector instructions.
    """
    from iced_x86 import Decoder

    return _examiner()(Decoder(bits, raw).decode())


@cache
def _examiner() -> Callable[[Instruction], bool]:
    from iced_x86 import CpuidFeature, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, RegisterExt

    factory = InstructionInfoFactory()
    faulting = {
        Mnemonic.DIV, Mnemonic.IDIV, Mnemonic.AAM, Mnemonic.BOUND, Mnemonic.UD0, Mnemonic.UD1, Mnemonic.UD2,
        Mnemonic.INVALID, Mnemonic.HLT,
    }  # fmt: skip
    # An address that is worked out, as by lea and long nops, is not looked at.
    untouched = (OpAccess.NONE, OpAccess.NO_MEM_ACCESS)

    def examine(instruction: Instruction) -> bool:
        if instruction.mnemonic in faulting or instruction.is_privileged:
            return True
        operands = range(instruction.op_count)
        registers = [instruction.op_register(n) for n in operands if instruction.op_kind(n) == OpKind.REGISTER]
        if any(map(RegisterExt.is_vector_register, registers)) or CpuidFeature.FPU in instruction.cpuid_features():
            return True
        return any(memory.access not in untouched for memory in factory.info(instruction).used_memory())

    return examine
