"""
Instructions that complete whenever they are executed, but on a stack that is at its end.

A record is of an instruction that has completed. A handler in the process writes it before that: so only such
instructions get one.
"""

from __future__ import annotations

from dprobes.engines.x86.relocation import copy_of

__all__ = ["always_completes"]

_PLAIN = (
    "mov", "movzx", "movsx", "movsxd", "lea", "add", "sub", "cmp", "test", "and", "or", "xor", "inc", "dec", "neg",
    "not", "push", "pop", "call", "jmp", "ret", "leave", "nop", "endbr64", "shl", "shr", "sar", "imul",
)  # fmt: skip
"""What cannot fail but for its memory."""


def always_completes(raw: bytes) -> bool:
    """Return whether a 64-bit instruction needs no memory but the stack and what its own module has at fixed places."""
    from iced_x86 import Decoder, FlowControl, InstructionInfoFactory, Mnemonic, OpKind, Register, RegisterExt

    copy = copy_of(raw, 8)
    if copy is not None and copy.cannot_fault:
        return True
    instruction = Decoder(64, raw).decode()
    is_branch = instruction.flow_control in (FlowControl.CONDITIONAL_BRANCH, FlowControl.UNCONDITIONAL_BRANCH)
    names = {getattr(Mnemonic, name.upper()) for name in _PLAIN}
    if (not is_branch and instruction.mnemonic not in names) or instruction.is_privileged:
        return False
    registers = (n for n in range(instruction.op_count) if instruction.op_kind(n) == OpKind.REGISTER)
    if any(RegisterExt.is_segment_register(instruction.op_register(n)) for n in registers):
        return False
    own = Register.NONE if instruction.is_ip_rel_memory_operand else Register.RSP  # its base is computed already
    for memory in InstructionInfoFactory().info(instruction).used_memory():
        is_plain = int(memory.index) == Register.NONE and int(memory.segment) not in (Register.FS, Register.GS)
        if int(memory.base) not in (Register.RSP, own) or not is_plain:
            return False
    return True
