"""
The code that a jump leads to: the displaced instructions, each with its handler before it if it is probed.

::

    handler of the first instruction │ the instruction │ the next one │ handler of the third │ the third │ jump back

Where 32-bit code can be, a trap for that comes first (``OF_64_BITS``). A handler may have a trial before it. Where one
is in the middle, a thread that stands at the original instruction goes on at the handler.
"""

from __future__ import annotations

from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING

from dprobes.engines.inline.trialcode import TrialCode
from dprobes.engines.ptrace.sitepatch import OF_64_BITS, CodeCopy
from dprobes.engines.x86.patches.displaced import displaced
from dprobes.lazynamedtuple import NamedTuple
from dprobes.native.code import NativeCode
from dprobes.native.x86.trampoline import make_trampoline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.engines.inline.trials import Trial
    from dprobes.engines.ptrace.sitepatch import NativeStop
    from dprobes.engines.x86.patches.displaced import DisplacedCode
    from dprobes.engines.x86.patches.plans import Plan
    from dprobes.native.code import CodeSwitch, Part
    from dprobes.native.faults import Fixup
    from dprobes.native.x86.assembler import X86Assembler

__all__ = ["Trampoline", "make_displacing_trampoline"]

_NONE: Mapping[int, Trial] = MappingProxyType({})
_END_OF_32_BITS = 1 << 32


class Trampoline(NamedTuple):
    """
    Code, and what its instructions stand for.

    ``moves`` are (address, where a thread goes on that stands there) for what is overwritten by the jump. ``stops`` are
    where trials leave a hit to the breakpoint. Each of the ``switches`` has the instruction that its handlers are for.
    """

    code: NativeCode
    moves: tuple[tuple[int, int], ...]
    copies: tuple[CodeCopy, ...]
    stops: tuple[NativeStop, ...] = ()
    switches: tuple[tuple[int, CodeSwitch], ...] = ()


def make_displacing_trampoline(
    plan: Plan,
    address: int,
    handlers: Mapping[int, Sequence[Part]],
    trials: Mapping[int, Trial] = _NONE,
    *,
    has_switches: bool = False,
) -> Trampoline:
    """
    Return the trampoline at ``address`` for the jump of a plan, with the ``handlers`` of probed instructions.

    Before the handlers of some instructions there are ``trials``. With ``has_switches`` it can do without some of them.
    """
    # What has a mark for indirect branches begins behind it.
    probed = {max(site, plan.start): (site, each) for site, each in handlers.items()}
    end = plan.start + len(plan.raw)
    code = OF_64_BITS if plan.start < _END_OF_32_BITS else b""
    copies: list[CodeCopy] = []
    moves: dict[int, int] = {}
    fixups: list[Fixup] = []
    stops: list[NativeStop] = []
    switches: list[tuple[int, CodeSwitch]] = []
    for first, last in pairwise(sorted({plan.start, *probed, end})):
        raw = plan.raw[first - plan.start : last - plan.start]
        entry = address + len(code)
        before = probed.get(first)
        trial = None if before is None else TrialCode(trials.get(before[0]), before[0])
        piece, copy = _piece(entry, first, raw, before, trial, goes_back=last == end, has_switches=has_switches)
        code += piece.code
        fixups += piece.fixups
        stops += [] if trial is None else trial.stops
        switches += [] if before is None else [(before[0], switch) for switch in piece.switches]
        copies += (CodeCopy(*boundary) for boundary in copy.boundaries)
        for original in plan.boundaries:
            if first <= original < last and (where := copy.copy_of(original)) is not None:
                moves[original] = where
        if first in probed:
            moves[first] = entry
    if plan.start in handlers or not any(site < plan.start for site in handlers):
        moves.pop(plan.start, None)  # the jump itself is there
    else:
        moves[plan.start] = next(copy.copy for copy in copies if copy.exact)  # behind the mark it has been hit
    made = NativeCode(address, code, tuple(fixups))
    return Trampoline(made, tuple(sorted(moves.items())), tuple(copies), tuple(stops), tuple(switches))


def _piece(
    address: int,
    first: int,
    raw: bytes,
    probed: tuple[int, Sequence[Part]] | None,
    trial: TrialCode | None,
    *,
    goes_back: bool,
    has_switches: bool,
) -> tuple[NativeCode, DisplacedCode]:
    """Return the handler of an instruction, if there is one, and the copy of that and of what follows unprobed."""
    made: list[DisplacedCode] = []

    def copy_at(place: int) -> bytes:
        copy = displaced(raw, first, place, goes_back=goes_back)
        assert copy is not None, "the trampoline is near the instruction"
        made[:] = [copy]
        return copy.code

    def write_rest(asm: X86Assembler) -> None:
        asm.raw(copy_at(asm.here))

    if probed is None:
        code = NativeCode(address, copy_at(address))
    else:
        code = make_trampoline(address, *probed, write_rest, trial, has_switches=has_switches)
    return code, made[0]
