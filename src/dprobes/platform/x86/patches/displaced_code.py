"""
Displaced code, which executes one or more instructions at another address and continues after the originals.

It has the effects of the original on registers, flags, memory and the program counter. Bytes are copied unchanged where
possible. Relative addresses are corrected, and a short branch becomes a near one. A call pushes the *original* return
address and jumps. So unwinders and exceptions see the original caller, and no call returns to the copy::

    call TARGET      push RETURN (low half) | mov dword [rsp+4], RETURN (high half) | jmp TARGET
    call [MEMORY]    push [MEMORY] | pop [rsp-16] | push ... | mov ... | jmp [rsp-8]
    call rsp         push rsp      | the same
    loop TARGET      loop +2 | jmp +5 | jmp TARGET
    syscall          syscall | mov rcx, NEXT: the value that the instruction leaves in rcx

A call through memory loads the target before it pushes anything, as the original does, so a fault leaves the state
unchanged. The size of the code depends only on the original, not on the address of the copy.

The process can observe these differences: the address of a faulting instruction, the last-instruction address of the
x87 unit, and words in the red zone below a return address, which a call through memory overwrites.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from dprobes.platform.x86.instruction_relocation import CodeCopy, Copy, relocated
from dprobes.platform.x86.patches.branch_targets import kind_of, legacy_prefixes, undisplaceable

if TYPE_CHECKING:
    from iced_x86 import Decoder, Instruction

__all__ = ["DisplacedCode", "displaced", "jump"]

_WITHOUT_EFFECT = b"\xf2\xf3\x2e\x36\x3e\x26"
"""Prefixes without effect on a branch in 64-bit code, except in units that do not exist (bnd) or check jumps only."""
_NOTRACK = 0x3E
_SYSTEM_CALL = b"\x0f\x05"

_PUSH_NUMBER, _STORE_HIGH_HALF = b"\x68", b"\xc7\x44\x24\x04"  # mov dword ptr [rsp+4]
_PUSH_SP = b"\x54"
_POP_BELOW, _JUMP_BELOW = b"\x8f\x44\x24\xf0", b"\xff\x64\x24\xf8"  # pop [rsp-16], jmp [rsp-8]
_LOAD_RCX = b"\x48\xb9"
_JUMP_SHORT_5 = b"\xeb\x05"


class DisplacedCode(NamedTuple):
    """
    Code at ``address`` that executes the ``size`` bytes of instructions from ``original`` on.

    ``boundaries`` has the addresses of its instructions, in order. ``comes_back`` is True if control continues after
    the original instructions.
    """

    original: int
    size: int
    address: int
    code: bytes
    boundaries: tuple[CodeCopy, ...]
    comes_back: bool

    def at(self, pc: int) -> CodeCopy | None:
        """
        Return the addresses of the copied instruction that contains ``pc``.

        Return None if ``pc`` is not in the copies.
        """
        if not self.address <= pc < self.address + len(self.code):
            return None
        return self.boundaries[bisect_right(self.boundaries, pc, key=lambda boundary: boundary.copy) - 1]

    def copy_of(self, original: int) -> int | None:
        """
        Return the address to which a thread at the start of a displaced instruction can be moved.

        Return None elsewhere.
        """
        if not self.original <= original < self.original + self.size:
            return None
        return next((b.copy for b in self.boundaries if b.original == original and b.exact), None)


def displaced(raw: bytes, address: int, copy: int, *, goes_back: bool = True) -> DisplacedCode | None:
    """
    Return code at the address ``copy`` that executes the instructions with the bytes ``raw`` from ``address``.

    Return None if an address in them is too far from the copy. Each instruction must be displaceable. Only the last one
    may be a system call, or an instruction from which control does not continue. If ``goes_back`` is False, control
    continues after the copy. So a handler can run between two instructions of a window.
    """
    sizes = _sizes_of_plain(raw)
    if sizes is not None:
        return _plain(raw, address, copy, sizes, goes_back=goes_back)
    from iced_x86 import Decoder

    decoder = Decoder(64, raw, ip=address)
    copier = _Copier(copy)
    position = 0
    try:
        while position < len(raw):
            assert copier.comes_back, "only the last instruction may leave"
            instruction = decoder.decode()
            assert undisplaceable(instruction, raw[position : position + instruction.len]) is None
            copier.add(instruction, raw[position : position + instruction.len], decoder)
            position += instruction.len
        if copier.comes_back and goes_back:
            copier.put(jump(copier.end, address + len(raw)), address + len(raw))
    except OverflowError:
        return None
    return DisplacedCode(address, len(raw), copy, bytes(copier.code), tuple(copier.boundaries), copier.comes_back)


@lru_cache(1 << 14)
def _sizes_of_plain(raw: bytes) -> tuple[int, ...] | None:
    """Return the sizes of instructions that can be copied unchanged, or None if one of them cannot."""
    from iced_x86 import Decoder, FlowControl

    sizes, position = [], 0
    for instruction in Decoder(64, raw):
        code = raw[position : position + instruction.len]
        if (
            instruction.flow_control != FlowControl.NEXT
            or instruction.is_ip_rel_memory_operand
            or kind_of(instruction.code).leaves
            or undisplaceable(instruction, code) is not None
            or code == _SYSTEM_CALL
        ):
            return None
        sizes.append(instruction.len)
        position += instruction.len
    return tuple(sizes) if position == len(raw) else None


def _plain(raw: bytes, address: int, copy: int, sizes: tuple[int, ...], *, goes_back: bool) -> DisplacedCode | None:
    """
    Return the result of ``displaced`` for instructions of these ``sizes``, whose copies are their bytes.

    Return None if the jump back does not reach.
    """
    boundaries, original, place = [], address, copy
    for size in sizes:
        boundaries.append(CodeCopy(place, original, True))
        original += size
        place += size
    if not goes_back:
        return DisplacedCode(address, len(raw), copy, raw, tuple(boundaries), True)
    boundaries.append(CodeCopy(place, original, True))
    try:
        code = raw + jump(place, original)
    except OverflowError:
        return None
    return DisplacedCode(address, len(raw), copy, code, tuple(boundaries), True)


def jump(address: int, target: int) -> bytes:
    """Return a 5-byte ``jmp rel32`` at ``address``; raise OverflowError if the target is not within 2 GiB."""
    return b"\xe9" + _distance(address + 5, target)


def _distance(end: int, target: int) -> bytes:
    """
    Return the distance field of an instruction that ends at ``end``.

    Raise OverflowError if it needs more than 32 bits.
    """
    return (target - end).to_bytes(4, "little", signed=True)


class _Copier:
    """Writer of consecutive copies of displaced instructions at another address."""

    def __init__(self, address: int) -> None:
        self.end = address
        self.code = bytearray()
        self.boundaries: list[CodeCopy] = []
        self.comes_back = True

    def put(self, code: bytes, original: int, *, exact: bool = True) -> None:
        """Append the copy of the instruction at ``original``; ``exact`` as in ``CodeCopy``."""
        self.boundaries.append(CodeCopy(self.end, original, exact))
        self.code += code
        self.end += len(code)

    def add(self, instruction: Instruction, raw: bytes, decoder: Decoder) -> None:
        """Append code that has the effect of one displaced instruction, whose bytes are ``raw``."""
        from iced_x86 import FlowControl, Mnemonic

        match instruction.flow_control:
            case FlowControl.UNCONDITIONAL_BRANCH:
                self.put(jump(self.end, instruction.near_branch_target), instruction.ip)
                self.comes_back = False
            case FlowControl.CONDITIONAL_BRANCH:
                self._branch(instruction, raw)
            case FlowControl.CALL if instruction.is_call_near:
                self._push_return(instruction, exact=True)
                target = instruction.near_branch_target
                self.put(jump(self.end, target), target)
                self.comes_back = False
            case FlowControl.INDIRECT_CALL:
                self._indirect_call(instruction, raw)
            case FlowControl.XBEGIN_XABORT_XEND if instruction.mnemonic == Mnemonic.XBEGIN:
                self.put(raw[:-4] + _distance(self.end + len(raw), instruction.near_branch_target), instruction.ip)
            case _:
                self._keep(instruction, raw, decoder)

    def _keep(self, instruction: Instruction, raw: bytes, decoder: Decoder) -> None:
        self.put(self._relocated(instruction, raw, decoder), instruction.ip)
        self.comes_back = not kind_of(instruction.code).leaves
        if raw == _SYSTEM_CALL:
            self.put(_LOAD_RCX + instruction.next_ip.to_bytes(8, "little"), instruction.next_ip, exact=False)

    def _relocated(self, instruction: Instruction, raw: bytes, decoder: Decoder) -> bytes:
        from iced_x86 import Register

        if not instruction.is_ip_rel_memory_operand:
            return raw
        start = decoder.get_constant_offsets(instruction).displacement_offset
        if instruction.memory_base == Register.EIP:  # the sum has 32 bits, so every distance is in reach
            distance = int.from_bytes(raw[start : start + 4], "little") + instruction.ip - self.end
            return raw[:start] + (distance & 0xFFFFFFFF).to_bytes(4, "little") + raw[start + 4 :]
        moved = relocated(raw, Copy(start), instruction.ip, self.end)
        if moved is None:
            raise OverflowError
        return moved

    def _branch(self, instruction: Instruction, raw: bytes) -> None:
        from iced_x86 import Mnemonic

        target = instruction.near_branch_target
        counting = (Mnemonic.LOOP, Mnemonic.LOOPE, Mnemonic.LOOPNE, Mnemonic.JCXZ, Mnemonic.JECXZ, Mnemonic.JRCXZ)
        if instruction.mnemonic not in counting:
            opcode = bytes((0x0F, 0x80 | raw[_opcode(raw) + (raw[_opcode(raw)] == 0x0F)] & 15))
            self.put(opcode + _distance(self.end + 6, target), instruction.ip)
            return
        prefix = b"\x67" if 0x67 in raw[: legacy_prefixes(raw)] else b""
        self.put(prefix + raw[-2:-1] + b"\x02", instruction.ip)
        self.put(_JUMP_SHORT_5, instruction.next_ip)
        self.put(jump(self.end, target), target)

    def _push_return(self, instruction: Instruction, *, exact: bool) -> None:
        """Append code that pushes a call's return address: a sign-extended half, and the other one if it differs."""
        address = instruction.next_ip
        low, high = address & 0xFFFFFFFF, address >> 32
        self.put(_PUSH_NUMBER + low.to_bytes(4, "little"), instruction.ip, exact=exact)
        if high != (0xFFFFFFFF if low >> 31 else 0):
            self.put(_STORE_HIGH_HALF + high.to_bytes(4, "little"), instruction.ip, exact=False)

    def _indirect_call(self, instruction: Instruction, raw: bytes) -> None:
        from iced_x86 import OpKind, Register

        self.comes_back = False
        prefixes = legacy_prefixes(raw)
        kept = bytes(byte for byte in raw[:prefixes] if byte not in _WITHOUT_EFFECT)
        notrack = bytes((_NOTRACK,)) if _NOTRACK in raw[:prefixes] else b""
        opcode = _opcode(raw)
        modrm, rest = raw[opcode + 1], raw[opcode + 2 :]
        in_register = instruction.op0_kind == OpKind.REGISTER
        if in_register and instruction.op0_register != Register.RSP:
            self._push_return(instruction, exact=True)
            # /2 calls and /4 jumps.
            code = notrack + raw[prefixes:opcode] + bytes((0xFF, modrm & 0xC7 | 4 << 3))
            self.put(code, instruction.ip, exact=False)
            return
        if in_register:
            self.put(_PUSH_SP, instruction.ip)
        else:
            code = kept + raw[prefixes:opcode] + bytes((0xFF, modrm & 0xC7 | 6 << 3)) + rest  # /6 pushes
            if instruction.is_ip_rel_memory_operand:
                end = self.end + len(code)
                if instruction.memory_base == Register.EIP:
                    field = (instruction.ip_rel_memory_address - end & 0xFFFFFFFF).to_bytes(4, "little")
                else:
                    field = _distance(end, instruction.ip_rel_memory_address)
                code = code[:-4] + field
            self.put(code, instruction.ip)
        self.put(_POP_BELOW, instruction.ip, exact=False)
        self._push_return(instruction, exact=False)
        self.put(notrack + _JUMP_BELOW, instruction.ip, exact=False)


def _opcode(raw: bytes) -> int:
    """Return the index of a branch's opcode byte in ``raw``, after legacy prefixes and REX."""
    position = legacy_prefixes(raw)
    return position + (0x40 <= raw[position] <= 0x4F)
