"""
Possible values of the program counter after one instruction, for machines without a single step.

Branches are recognised by the instruction formats of each processor. A conditional branch has two successors, its
target and the next instruction; any other instruction that is not a branch has only the next one. Registers have the
names of ``arch``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.target.code.machine_code import prepare_decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["successors"]


def successors(
    machine: str,
    raw: bytes,
    address: int,
    register: Callable[[str], int],
    word: Callable[[int], int],
) -> frozenset[int]:
    """
    Return the possible values of the program counter after the instruction ``raw`` at ``address``.

    ``register`` returns the value of a register by its name, ``word`` the word at an address in memory. Raise
    ``TargetError`` if the target of the branch is unknown.
    """
    after = address + len(raw)
    match machine:
        case "aarch64":
            found = _of_aarch64(int.from_bytes(raw, "little"), address, register)
        case "riscv64":
            found = _of_riscv(int.from_bytes(raw, "little"), address, after, register)
        case "s390" | "s390x":
            found = _of_s390(raw, address, after, register)
        case "ppc" | "ppc64":
            found = _of_power(int.from_bytes(raw, "big"), address, register)
        case "i386" | "x86_64":
            found = _of_x86(raw, 64 if machine == "x86_64" else 32, address, register, word)
        case _:
            raise TargetError(f"the branches of {machine} are not known")
    mask = (1 << (64 if machine in ("aarch64", "riscv64", "s390x", "ppc64", "x86_64") else 32)) - 1
    return frozenset(each & mask for each in found or (after,))


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> bits - 1 & 1 else value


def _of_aarch64(word: int, pc: int, register: Callable[[str], int]) -> tuple[int, ...]:
    """
    Decode branches by the Arm Architecture Reference Manual, section C4.1.65.

    The section is "Branches, Exception Generating and System instructions".
    """
    if word & 0x7C00_0000 == 0x1400_0000:  # b, bl
        return (pc + 4 * _signed(word & 0x3FF_FFFF, 26),)
    if word & 0xFF00_0000 == 0x5400_0000 or word & 0x7E00_0000 == 0x3400_0000:  # b.cond, cbz, cbnz
        return pc + 4, pc + 4 * _signed(word >> 5 & 0x7_FFFF, 19)
    if word & 0x7E00_0000 == 0x3600_0000:  # tbz, tbnz
        return pc + 4, pc + 4 * _signed(word >> 5 & 0x3FFF, 14)
    if word & 0xFE00_0000 == 0xD600_0000:  # br, blr, ret; others check a signature, or leave the kernel
        if word & 0xFF9F_FC1F != 0xD61F_0000:
            raise TargetError(f"where the branch {word:#010x} leads is not known")
        number = word >> 5 & 31
        return (0 if number == 31 else register(f"x{number}"),)
    return ()


# The offsets of RISC-V's branches: pairs of a bit of the instruction and the bit of the offset.
_OF_C_J = ((12, 11), (11, 4), (10, 9), (9, 8), (8, 10), (7, 6), (6, 7), (5, 3), (4, 2), (3, 1), (2, 5))
_OF_C_BEQZ = ((12, 8), (11, 4), (10, 3), (6, 7), (5, 6), (4, 2), (3, 1), (2, 5))
_OF_JAL = ((31, 20), *((12 + n, 12 + n) for n in range(8)), (20, 11), *((21 + n, 1 + n) for n in range(10)))
_OF_BEQ = ((31, 12), (7, 11), *((25 + n, 5 + n) for n in range(6)), *((8 + n, 1 + n) for n in range(4)))


def _of_riscv(word: int, pc: int, after: int, register: Callable[[str], int]) -> tuple[int, ...]:
    """
    Decode branches by the RISC-V unprivileged ISA.

    The chapters are "RV32I Base Integer Instruction Set" and "C" (compressed instructions).
    """
    if word & 3 != 3:
        quadrant, function = word & 3, word >> 13
        if quadrant == 1 and function == 5:  # c.j: offset[11|4|9:8|10|6|7|3:1|5]
            return (pc + _signed(_gathered(word, _OF_C_J), 12),)
        if quadrant == 1 and function in (6, 7):  # c.beqz, c.bnez: offset[8|4:3] ... offset[7:6|2:1|5]
            return after, pc + _signed(_gathered(word, _OF_C_BEQZ), 9)
        if quadrant == 2 and function == 4 and not word >> 2 & 31 and word >> 7 & 31:  # c.jr, c.jalr
            return (register(f"x{word >> 7 & 31}") & ~1,)
        return ()
    match word & 0x7F:
        case 0x6F:  # jal
            return (pc + _signed(_gathered(word, _OF_JAL), 21),)
        case 0x67:  # jalr
            return (register(f"x{word >> 15 & 31}") + _signed(word >> 20, 12) & ~1,)
        case 0x63:  # beq ... bgeu
            return after, pc + _signed(_gathered(word, _OF_BEQ), 13)
        case 0x73 if word & 0x7FFF == 0x73 and word >> 20 in (0x002, 0x102, 0x302):
            raise TargetError(f"where the return {word:#010x} leads is not known")
    return ()


def _gathered(word: int, parts: Sequence[tuple[int, int]]) -> int:
    """
    Return a number whose bits are scattered over a word.

    ``parts`` has pairs of bit positions, in word and number.
    """
    return sum((word >> there & 1) << here for there, here in parts)


_RELATIVE_EC = frozenset((0x44, 0x45, 0x64, 0x65, 0x76, 0x77, 0x7C, 0x7D, 0x7E, 0x7F))
"""Codes of brxhg, brxlg, and compare and branch relative."""


def _of_s390(raw: bytes, pc: int, after: int, register: Callable[[str], int]) -> tuple[int, ...]:
    """
    Decode branches by operation code.

    Source: z/Architecture Principles of Operation, appendix B, "Lists of Instructions".
    """

    def base(number: int) -> int:
        return register(f"gpr{number}") if number else 0

    first, second = raw[0], raw[1]
    indexed = base(second & 15) + base(raw[2] >> 4) + ((raw[2] & 15) << 8 | raw[3]) if len(raw) > 2 else 0
    near = pc + 2 * _signed(int.from_bytes(raw[2:4], "big"), 16)
    match first, second & 15:
        case (
            (0x05 | 0x06 | 0x07 | 0x0B | 0x0C | 0x0D),
            low,
        ):  # balr, bctr, bcr, bsm, bassm, basr: to a register, if any
            return (after, register(f"gpr{low}") & ~1) if low else ()
        case ((0x45 | 0x46 | 0x47 | 0x4D), _):  # bal, bct, bc, bas
            return after, indexed
        case ((0x84 | 0x85), _):  # brxh, brxle
            return after, near
        case ((0x86 | 0x87), _):  # bxh, bxle, without an index
            return after, base(raw[2] >> 4) + ((raw[2] & 15) << 8 | raw[3])
        case 0xA7, (4 | 5 | 6 | 7):  # brc, bras, brct, brctg
            return after, near
        case (0xC0, (4 | 5)) | (0xCC, 6):  # brcl, brasl, brcth
            return after, pc + 2 * _signed(int.from_bytes(raw[2:6], "big"), 32)
        case 0xEC, _ if raw[5] in _RELATIVE_EC:
            return after, near
        case 0xE3, _ if raw[5] == 0x46:  # bctg
            return after, indexed + (_signed(raw[4], 8) << 12)
        case 0xEB, _ if raw[5] in (0x44, 0x45):  # bxhg, bxleg
            return after, base(raw[2] >> 4) + ((raw[2] & 15) << 8 | raw[3]) + (_signed(raw[4], 8) << 12)
        case ((0x82 | 0xB2 | 0xE3), _) if first == 0x82 or (first == 0xB2 and second == 0xB2) or raw[-1] == 0x47:
            raise TargetError(f"where the branch {raw.hex()} leads is not known")  # lpsw, lpswe, bic
    return ()


def _of_power(word: int, pc: int, register: Callable[[str], int]) -> tuple[int, ...]:
    """Decode branches by the Power ISA, book I, section 2.4, "Branch Instructions"."""
    is_absolute = word >> 1 & 1
    match word >> 26:
        case 18:  # b
            offset = _signed(word & 0x3FF_FFFC, 26)
            return (offset if is_absolute else pc + offset,)
        case 16:  # bc
            offset = _signed(word & 0xFFFC, 16)
            return pc + 4, offset if is_absolute else pc + offset
        case 19:
            match word >> 1 & 0x3FF:
                case 16:  # bclr
                    return pc + 4, register("lnk") & ~3
                case 528:  # bcctr
                    return pc + 4, register("ctr") & ~3
                case 18 | 50 | 274 | 560:  # rfid, rfi, hrfid; bctar, whose register stubs do not have
                    raise TargetError(f"where the branch {word:#010x} leads is not known")
    return ()


def _of_x86(
    raw: bytes, bits: int, pc: int, register: Callable[[str], int], word: Callable[[int], int]
) -> tuple[int, ...]:
    """Decode branches by the Intel SDM, volume 1, section 7.3.8, "Control Transfer Instructions"."""
    prepare_decoder()
    from iced_x86 import Decoder, FlowControl, Mnemonic, OpKind, Register

    instruction = Decoder(bits, raw, ip=pc).decode()
    names = {number: name.lower() for name, number in vars(Register).items() if isinstance(number, int)}
    flow, is_far = instruction.flow_control, instruction.is_jmp_far or instruction.is_call_far
    if flow in (FlowControl.UNCONDITIONAL_BRANCH, FlowControl.CALL) and not is_far:
        return (instruction.near_branch_target,)
    if flow == FlowControl.CONDITIONAL_BRANCH:
        return instruction.next_ip, instruction.near_branch_target
    if instruction.mnemonic == Mnemonic.RET:
        return (word(register("sp")),)
    if flow in (FlowControl.INDIRECT_BRANCH, FlowControl.INDIRECT_CALL):
        if instruction.op0_kind == OpKind.REGISTER:
            return (register(names[instruction.op0_register]),)
        if instruction.is_ip_rel_memory_operand:
            return (word(instruction.ip_rel_memory_address),)
        if not instruction.segment_prefix and (instruction.is_jmp_near_indirect or instruction.is_call_near_indirect):
            base, index = instruction.memory_base, instruction.memory_index
            place = instruction.memory_displacement + (register(names[base]) if base else 0)
            place += register(names[index]) * instruction.memory_index_scale if index else 0
            return (word(place & (1 << bits) - 1),)
    if flow in (FlowControl.NEXT, FlowControl.INTERRUPT) or instruction.mnemonic in (
        Mnemonic.SYSCALL,
        Mnemonic.SYSENTER,
    ):
        return ()
    raise TargetError(f"where the branch {raw.hex()} leads is not known")
