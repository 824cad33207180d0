"""
Control flow of a handler, from its encoded bytes: what can be reached, where blocks begin, what is known there.

Known is, where all paths agree on it, how many cells are on the RPN stack, and LP. Both let the lowering address memory
by constants instead of masked numbers.
"""

from __future__ import annotations

from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass
from dprobes.lazynamedtuple import NamedTuple
from dprobes.rpn.decoder import decode_one
from dprobes.rpn.effects import stack_effect
from dprobes.rpn.isa import LOG_WIDTHS, Flow
from dprobes.rpn.program import Instruction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.arch import Architecture
    from dprobes.rpn.decoder import EncodedInstruction
    from dprobes.rpn.effects import StackEffect
    from dprobes.rpn.encoder import CodeImage
    from dprobes.rpn.tables import Table

__all__ = ["LOSES_DEPTH", "HandlerFlow", "Known", "analyse"]


class Known(NamedTuple):
    """Hold what all paths to an instruction agree on: cells on the stack, and LP; None where they do not."""

    depth: int | None
    lp: int | None


_NOTHING = Known(None, None)

LOSES_DEPTH = ("restore tsp", "dup", "log", "callk", "callk <name>")
"""The instructions after which nothing is known of the depth."""


@dataclass
class HandlerFlow:
    """
    Hold what was found out about one handler and the procedures that it calls.

    ``leaders`` are the instructions at which blocks begin, ``known`` what is known at them. ``catches`` are the targets
    of ``sx``, ``returns`` the places behind calls. ``has_cycle`` says that something may be executed more than once.
    ``tables`` are those of the program.
    """

    start: int
    instructions: dict[int, EncodedInstruction] = field(default_factory=dict)
    leaders: set[int] = field(default_factory=set)
    known: dict[int, Known] = field(default_factory=dict)
    catches: set[int] = field(default_factory=set)
    returns: set[int] = field(default_factory=set)
    has_cycle: bool = False
    tables: Sequence[Table] = ()
    _effects: dict[int, StackEffect] = field(default_factory=dict)

    @cached_property
    def _syntaxes(self) -> frozenset[str]:
        return frozenset(i.row.syntax for i in self.instructions.values() if i.row is not None)

    def uses(self, *syntaxes: str) -> bool:
        """Return whether an instruction with one of these syntaxes can be reached."""
        return not self._syntaxes.isdisjoint(syntaxes)

    @property
    def keeps_base(self) -> bool:
        """Whether SBP is what it was at the start of the handler wherever an instruction reads it."""
        return not self.uses("restore sbp", "callk", "callk <name>")

    def effect(self, instruction: EncodedInstruction, architecture: Architecture) -> StackEffect:
        """Return what an instruction of the handler does to the depth of the stack."""
        effect = self._effects.get(instruction.offset)
        if effect is None:
            assert instruction.row is not None
            effect = stack_effect(Instruction(instruction.row, instruction.operand), architecture, self.tables)
            self._effects[instruction.offset] = effect
        return effect

    def log_bound(self, word_size: int) -> int | None:
        """Return how many bytes the handler logs at most without a loop; None if that depends on what it finds."""
        bound = 0
        for instruction in self.instructions.values():
            row = instruction.row
            if row is None or row.operator != "log":
                continue
            if row.syntax not in LOG_WIDTHS:
                return None
            bound += (LOG_WIDTHS[row.syntax] or word_size) * int(instruction.operand)
        return bound

    def loop_heads(self) -> set[int]:
        """Return the instructions to which another one goes back that stands behind them, or itself."""
        jumps = (Flow.JUMP, Flow.BRANCH, Flow.CALL)
        return {
            int(i.operand)
            for i in self.instructions.values()
            if i.row is not None and i.row.flow in jumps and int(i.operand) <= i.offset
        }

    @property
    def jumps(self) -> int:
        """The number of instructions that cost one of the jump budget."""
        costly = (Flow.JUMP, Flow.BRANCH, Flow.CALL)
        return sum(i.row is not None and i.row.flow in costly for i in self.instructions.values())


def analyse(image: CodeImage, architecture: Architecture, start: int, logmax: int) -> HandlerFlow:
    """Return the control flow of the handler that starts at byte ``start`` of an image."""
    return _Analysis(image, architecture, start, logmax).flow()


class _Analysis:
    def __init__(self, image: CodeImage, architecture: Architecture, start: int, logmax: int) -> None:
        self._image = image
        self._architecture = architecture
        self._logmax = logmax
        self._found = HandlerFlow(start, tables=image.tables)

    def flow(self) -> HandlerFlow:
        self._reach()
        self._find_cycle()
        self._propagate()
        return self._found

    def _reach(self) -> None:
        """Find all instructions and the leaders."""
        found = self._found
        found.leaders.add(found.start)
        arrivals: dict[int, int] = {found.start: 1}
        pending = [found.start]
        while pending:
            offset = pending.pop()
            if offset in found.instructions:
                continue
            image = self._image
            instruction = decode_one(image.data, offset, image.word_size, image.byte_order)
            found.instructions[offset] = instruction
            following = list(self._successors(instruction))
            for target, is_leader in following:
                arrivals[target] = arrivals.get(target, 0) + 1
                if is_leader or arrivals[target] > 1:
                    found.leaders.add(target)
            pending += [target for target, _ in reversed(following)]

    def _successors(self, instruction: EncodedInstruction) -> list[tuple[int, bool]]:
        """Return where control may go, exceptions excepted, and whether a block begins there."""
        row, found = instruction.row, self._found
        if row is None:
            return []
        target = instruction.operand
        if row.syntax == "sx <label>":
            assert isinstance(target, int)
            found.catches.add(target)
            return [(instruction.end, False), (target, True)]
        match row.flow:
            case Flow.NEXT:
                return [(instruction.end, row.syntax in LOSES_DEPTH)]
            case Flow.JUMP:
                assert isinstance(target, int)
                return [(target, True)]
            case Flow.BRANCH:
                assert isinstance(target, int)
                return [(instruction.end, True), (target, True)]
            case Flow.CALL:
                assert isinstance(target, int)
                found.returns.add(instruction.end)
                return [(instruction.end, True), (target, True)]
        return []

    def _find_cycle(self) -> None:
        """Say whether control can come back; calls and what is caught count as cycles to keep the argument short."""
        found = self._found
        if found.returns or found.catches:
            found.has_cycle = True
            return
        state: dict[int, bool] = {}  # False while an instruction is on the path
        path = [(found.start, iter(self._successors(found.instructions[found.start])))]
        state[found.start] = False
        while path:
            offset, successors = path[-1]
            following = next(successors, None)
            if following is None:
                state[offset] = True
                path.pop()
            elif following[0] not in state:
                target = following[0]
                state[target] = False
                path.append((target, iter(self._successors(found.instructions[target]))))
            elif not state[following[0]]:
                found.has_cycle = True
                return

    def _propagate(self) -> None:
        """Find out what is known at each leader, until nothing changes."""
        found = self._found
        pending = [(found.start, Known(0, 0))]
        pending += [(offset, _NOTHING) for offset in found.catches]
        while pending:
            offset, known = pending.pop()
            before = found.known.get(offset)
            merged = known if before is None else _agreed(before, known)
            if merged == before:
                continue
            found.known[offset] = merged
            pending += self._through_block(offset, merged)

    def _through_block(self, offset: int, known: Known) -> list[tuple[int, Known]]:
        """Return what is known where control goes from the block at ``offset``."""
        while True:
            instruction = self._found.instructions[offset]
            after = self._after(instruction, known)
            row = instruction.row
            if row is None:
                return []
            if row.flow is Flow.CALL:
                # What a procedure leaves behind is not worked out.
                return [(int(instruction.operand), after), (instruction.end, _NOTHING)]
            successors = [target for target, _ in self._successors(instruction)]
            if row.syntax == "sx <label>":
                successors = [instruction.end]  # the other one is known to be unknown
            if len(successors) != 1 or successors[0] in self._found.leaders:
                return [(target, after) for target in successors]
            offset, known = successors[0], after

    def _after(self, instruction: EncodedInstruction, known: Known) -> Known:
        row = instruction.row
        if row is None:
            return _NOTHING
        depth, lp = known
        if row.syntax in LOSES_DEPTH:
            depth = None
        elif depth is not None:
            effect = self._found.effect(instruction, self._architecture)
            depth += effect.pushed - effect.popped
        if row.syntax in LOG_WIDTHS and lp is not None:
            width = LOG_WIDTHS[row.syntax] or self._architecture.word_size
            lp += width * int(instruction.operand)
            if lp > self._logmax:
                lp = None
        elif row.operator == "log" or row.syntax == "pop lp" or row.operator == "callk":
            lp = None
        return Known(depth, lp)


def _agreed(one: Known, other: Known) -> Known:
    depth = one.depth if one.depth == other.depth else None
    return Known(depth, one.lp if one.lp == other.lp else None)
