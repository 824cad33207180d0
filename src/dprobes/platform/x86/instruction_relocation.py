"""
Relocation of an instruction to another address, decided once for each site.

If a thread single-steps a copy in an out-of-line *slot*, the breakpoint stays, and other threads need not be stopped.
An operand relative to the instruction pointer is corrected in the copy. The instruction pointer and a pushed return
address are corrected after the step. Instructions that cannot be corrected are stepped in place.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from iced_x86 import Instruction

__all__ = ["CodeCopy", "Copy", "copy_of", "relocated"]

# The system call instruction that returns after itself; syscall in 32-bit code and sysenter return to the vDSO.
_SYSTEM_CALLS = {8: b"\x0f\x05", 4: b"\xcd\x80"}


class CodeCopy(NamedTuple):
    """
    Addresses of an instruction's copy and of the original instruction.

    If ``exact`` is True, a thread stopped at the copy has the registers and memory that it would have at the original,
    except the program counter.
    """

    copy: int
    original: int
    exact: bool


class Copy(NamedTuple):
    """
    Properties of an instruction that decide how its copy at another address is executed.

    * ``displacement``: offset in the instruction of a 32-bit distance relative to the instruction pointer; 0 for none.
    * ``pushes_return``: it is a call through a register or memory, and its return address must be corrected.
    * ``cannot_fault``: it uses general registers only, and always completes.
    * ``leads_on``: it needs no correction afterwards, and stores its address nowhere.
    """

    displacement: int = 0
    pushes_return: bool = False
    cannot_fault: bool = False
    leads_on: bool = False


@lru_cache(1 << 14)
def copy_of(raw: bytes, word_size: int) -> Copy | None:
    """
    Return how a copy of the instruction ``raw`` is executed, or None if the instruction must be executed in place.

    ``word_size`` is the word size of the code in bytes, 4 or 8.
    """
    from iced_x86 import Decoder, FlowControl

    decoder = Decoder(8 * word_size, raw)
    instruction = decoder.decode()
    if instruction.is_invalid or instruction.len != len(raw) or _keeps_its_address(instruction.code):
        return None
    displacement = 0
    if instruction.is_ip_rel_memory_operand:
        displacement = decoder.get_constant_offsets(instruction).displacement_offset
    match instruction.flow_control:
        case FlowControl.NEXT:
            return Copy(displacement, cannot_fault=_cannot_fault(instruction), leads_on=_leads_on(instruction))
        case FlowControl.INDIRECT_CALL if not instruction.is_call_far_indirect:
            return Copy(displacement, pushes_return=True)
        case FlowControl.INDIRECT_BRANCH | FlowControl.RETURN | FlowControl.EXCEPTION:
            return Copy(displacement)
    return Copy() if raw == _SYSTEM_CALLS[word_size] else None


def relocated(raw: bytes, copy: Copy, address: int, slot: int) -> bytes | None:
    """
    Return the bytes of an instruction's copy at ``slot``.

    The instruction has the bytes ``raw``, is at ``address``, and has the properties ``copy``. Return None if its memory
    operand is not within 2 GiB of ``slot``.
    """
    if not copy.displacement:
        return raw
    start, end = copy.displacement, copy.displacement + 4
    distance = int.from_bytes(raw[start:end], "little", signed=True) + address - slot
    if not -(1 << 31) <= distance < 1 << 31:
        return None
    return raw[:start] + distance.to_bytes(4, "little", signed=True) + raw[end:]


@cache
def _keeps_its_address(code: int) -> bool:
    """
    Return True if instructions store their address in the state of the x87 unit, where it is not corrected.

    ``code`` is iced's code of the instructions.
    """
    from iced_x86 import CpuidFeature

    x87 = (
        CpuidFeature.FPU, CpuidFeature.FPU287, CpuidFeature.FPU287XL_ONLY,
        CpuidFeature.FPU387, CpuidFeature.FPU387SL_ONLY,
    )  # fmt: skip
    return any(feature in x87 for feature in _instruction_of(code).cpuid_features())


def _instruction_of(code: int) -> Instruction:
    """Return an instruction with iced's code ``code``, without operands."""
    from iced_x86 import Instruction

    instruction = Instruction()
    instruction.code = code  # type: ignore[assignment]
    return instruction


def _leads_on(instruction: Instruction) -> bool:
    """Return True if an instruction can run without a stop: it does not change the trap flag, and is not privileged."""
    from iced_x86 import Mnemonic

    changes_flags = (Mnemonic.POPF, Mnemonic.POPFD, Mnemonic.POPFQ)
    return instruction.mnemonic not in changes_flags and not instruction.is_privileged


def _cannot_fault(instruction: Instruction) -> bool:
    """Return True if an instruction only uses general registers, immediates and the arithmetic flags."""
    from iced_x86 import OpKind, RegisterExt

    kinds = [instruction.op_kind(number) for number in range(instruction.op_count)]
    if not kinds or OpKind.MEMORY in kinds or instruction.has_lock_prefix or not _only_computes(instruction.code):
        return False
    return all(
        (kind == OpKind.REGISTER and RegisterExt.is_gpr(instruction.op_register(number)))
        or OpKind.IMMEDIATE8 <= kind <= OpKind.IMMEDIATE32TO64
        for number, kind in enumerate(kinds)
    )


@cache
def _only_computes(code: int) -> bool:
    """Return True if instructions with iced's code ``code`` always complete unless their operands prevent it."""
    from iced_x86 import CpuidFeature as Feature
    from iced_x86 import Mnemonic

    computing = (
        Feature.INTEL8086, Feature.INTEL186, Feature.INTEL386, Feature.INTEL486, Feature.X64, Feature.CMOV,
        Feature.BMI1, Feature.BMI2, Feature.POPCNT, Feature.LZCNT, Feature.ADX,
    )  # fmt: skip
    instruction = _instruction_of(code)
    return (
        all(feature in computing for feature in instruction.cpuid_features())
        and instruction.mnemonic not in (Mnemonic.DIV, Mnemonic.IDIV, Mnemonic.AAM, Mnemonic.UD2)
        and not instruction.is_privileged
        and not instruction.is_stack_instruction
    )
