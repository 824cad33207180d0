"""The bytes of a plan: what is written into the code so that control goes to a trampoline, and whether it does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.x86.patches.displaced import jump
from dprobes.engines.x86.patches.plans import JUMP_SIZE, SHORT_JUMP_SIZE, Plan, Reach
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from dprobes.engines.x86.patches.codebytes import CodeBytes

__all__ = ["Write", "leads_to", "writes_of"]

_PREFIX = b"\x2e"
"""A segment that a jump does not have: it changes nothing (Intel SDM volume 1, 3.3.4)."""
_SHORT_JUMP = b"\xeb"


class Write(NamedTuple):
    """Say what is written at an address."""

    address: int
    data: bytes


def writes_of(plan: Plan, reach: Reach, trampoline: int) -> tuple[Write, ...]:
    """Return what is written for a plan, in this order; what is written last leads to what was written before."""
    if plan.padding is None:
        code = _PREFIX * reach.prefixes + jump(plan.start + reach.prefixes, trampoline)
        return (Write(plan.start, code[: plan.written]),)
    distance = plan.padding - plan.start - SHORT_JUMP_SIZE
    code = _SHORT_JUMP + distance.to_bytes(1, "little", signed=True)
    return Write(plan.padding, jump(plan.padding, trampoline)), Write(plan.start, code[: plan.written])


def leads_to(code: CodeBytes, address: int) -> int | None:
    """Return where the jump leads that stands at an address, and the jump that this one leads to; None if none does."""
    from iced_x86 import Code, Decoder

    place = address - code.start
    decoder = Decoder(64, bytes(code.current[place : place + 4 + JUMP_SIZE]), ip=address)
    instruction = decoder.decode()
    if instruction.code == Code.JMP_REL8_64:
        place = instruction.near_branch_target - code.start
        if not 0 <= place < len(code.current):
            return None
        decoder = Decoder(64, bytes(code.current[place : place + JUMP_SIZE]), ip=code.start + place)
        instruction = decoder.decode()
    return instruction.near_branch_target if instruction.code == Code.JMP_REL32_64 else None
