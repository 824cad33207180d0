"""
Control flow of a handler, from its encoded RPN: reachable instructions, basic blocks, and facts at the start of blocks.

The facts are the number of cells on the RPN stack, and LP, if they are the same on all paths. With them, the lowered
code addresses memory by constants instead of masked numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from dprobes.rpn.control_flow import stack_effect
from dprobes.rpn.instruction_encoding import decode_one
from dprobes.rpn.instruction_set import LOG_WIDTHS, Flow
from dprobes.rpn.rpn_program import Instruction
from dprobes.rpn.word_arithmetic import signed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.arch import Architecture
    from dprobes.rpn.control_flow import StackEffect
    from dprobes.rpn.instruction_encoding import CodeImage, EncodedInstruction
    from dprobes.rpn.keyed_tables import Table

__all__ = ["HandlerFlow", "analyse", "may_read_unwritten"]


class Known(NamedTuple):
    """
    Facts on which all paths to an instruction agree: the number of cells on the RPN stack, and LP.

    None if paths differ.
    """

    depth: int | None
    lp: int | None


_NOTHING = Known(None, None)

LOSES_DEPTH = ("restore tsp", "dup", "log", "callk", "callk <name>")
"""The instructions after which the depth is unknown."""


@dataclass
class HandlerFlow:
    """
    Control flow of one handler and of the procedures that it calls.

    ``leaders`` are the first instructions of blocks, and ``known`` has the facts at each of them. ``catches`` are the
    targets of ``sx``; ``returns`` are the places after calls. ``has_cycle`` is True if an instruction may be executed
    more than once. ``tables`` has the tables of the program.
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
        """Return whether an instruction with one of these syntaxes is reachable."""
        return not self._syntaxes.isdisjoint(syntaxes)

    @property
    def keeps_base(self) -> bool:
        """True if SBP has its initial value wherever an instruction reads it."""
        return not self.uses("restore sbp", "callk", "callk <name>")

    def effect(self, instruction: EncodedInstruction, architecture: Architecture) -> StackEffect:
        """Return how many cells an instruction of the handler pops from the RPN stack and pushes."""
        effect = self._effects.get(instruction.offset)
        if effect is None:
            assert instruction.row is not None
            effect = stack_effect(Instruction(instruction.row, instruction.operand), architecture, self.tables)
            self._effects[instruction.offset] = effect
        return effect

    def log_bound(self, word_size: int) -> int | None:
        """
        Return the maximum number of bytes logged by executing each instruction once.

        Return None if it depends on run-time values.
        """
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
        """Return the targets of jumps and calls whose target is the instruction itself or an earlier one."""
        jumps = (Flow.JUMP, Flow.BRANCH, Flow.CALL)
        return {
            int(i.operand)
            for i in self.instructions.values()
            if i.row is not None and i.row.flow in jumps and int(i.operand) <= i.offset
        }

    @property
    def jumps(self) -> int:
        """The number of instructions that are charged to the jump budget."""
        costly = (Flow.JUMP, Flow.BRANCH, Flow.CALL)
        return sum(i.row is not None and i.row.flow in costly for i in self.instructions.values())


def analyse(image: CodeImage, architecture: Architecture, start: int, logmax: int) -> HandlerFlow:
    """
    Return the control flow of the handler that starts at byte ``start`` of an image.

    ``logmax`` is the size of the log in bytes. An LP beyond it counts as unknown.
    """
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
        """Decode all reachable instructions, and find the leaders, which are the first instructions of blocks."""
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
        """Return the offsets of the successors, without exception handlers, each with whether a block begins there."""
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
        """Set ``has_cycle``. Calls and exception handlers count as cycles, which keeps the proof short."""
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
        """Compute, for each leader, the facts that hold on all paths to it, until a fixed point."""
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
        """
        Return the successors of the block at byte ``offset``, each with the facts after the block.

        ``known`` are the facts at the start of the block.
        """
        while True:
            instruction = self._found.instructions[offset]
            after = self._after(instruction, known)
            row = instruction.row
            if row is None:
                return []
            if row.flow is Flow.CALL:
                # The effect of a procedure is not computed.
                return [(int(instruction.operand), after), (instruction.end, _NOTHING)]
            successors = [target for target, _ in self._successors(instruction)]
            if row.syntax == "sx <label>":
                successors = [instruction.end]  # the other one is in ``catches``, where nothing is known
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


# The check for reads of RPN stack cells that the handler has not written: a state still has the data of earlier hits.
#
# From the top on, the analysis tracks the cells that the handler has certainly written, their values if known, and the
# depth of the stack. Where paths meet, only facts on which all of them agree are certain. A read of any other cell
# counts: the answer may be a false positive, but never a false negative.


_Cells = tuple[int | None, ...]
"""The values of the cells that are certainly written, the top one first, or None for an unknown value."""


class _Stack(NamedTuple):
    """
    The cells that a handler has certainly written, from the top on, and the stack's depth in cells, None if unknown.

    A cell is None if its value is unknown.
    """

    cells: _Cells
    depth: int | None

    def base_index(self, n: int) -> int:
        """Return how many cells below the top the cell at SBP + ``n`` is, if SBP has its initial value."""
        if self.depth is None:
            raise _UncertainError
        return self.depth + n

    def meet(self, other: _Stack) -> _Stack:
        """Return the facts on which this stack and another one agree, for an instruction that both paths reach."""
        cells = tuple(one if one == two else None for one, two in zip(self.cells, other.cells, strict=False))
        return _Stack(cells, self.depth if self.depth == other.depth else None)


_KEPT = 64
"""Maximum number of tracked cells: the limit makes the analysis of a recursive procedure terminate."""

_EXCEPTION = _Stack((None, None, None), None)
"""The stack of an exception's handler: code and parameters."""

_READS_ANY = frozenset({"push sbp", "push sbp, <n>", "trace pv", "callk", "callk <name>"})
"""Instructions that may read any cell. Extensions can access all of them."""

_WRITES_ANY = frozenset(
    f"{verb} {base}{n}" for verb in ("pop", "copy") for base in ("sbp", "tsp") for n in ("", ", <n>")
)


class _UncertainError(Exception):
    pass


def may_read_unwritten(image: CodeImage, architecture: Architecture, flow: HandlerFlow) -> bool:
    """Return whether a handler may read a cell that it has not written in the same hit."""
    walk = _Walk(image, architecture, flow)
    try:
        walk.run()
    except _UncertainError:
        return True
    return False


class _Walk:
    def __init__(self, image: CodeImage, architecture: Architecture, flow: HandlerFlow) -> None:
        self._architecture = architecture
        self._flow = flow
        self._relocated = {relocation.offset - 1 for relocation in image.relocations}

    def run(self) -> None:
        found: dict[int, _Stack] = {}
        pending: list[tuple[int, _Stack]] = [(self._flow.start, _Stack((), 0))]
        while pending:
            offset, stack = pending.pop()
            before = found.get(offset)
            if before is not None:
                stack = before.meet(stack)
                if stack == before:
                    continue
            found[offset] = stack
            pending += self._successors(self._flow.instructions[offset], stack)

    def _successors(self, instruction: EncodedInstruction, stack: _Stack) -> Iterator[tuple[int, _Stack]]:
        row = instruction.row
        if row is None:
            return
        if row.syntax == "sx <label>":
            yield int(instruction.operand), _EXCEPTION
        after = _Stack(self._cells_after(instruction, stack)[:_KEPT], self._depth_after(instruction, stack.depth))
        if row.flow in (Flow.NEXT, Flow.BRANCH):
            yield instruction.end, after
        if row.flow in (Flow.JUMP, Flow.BRANCH, Flow.CALL):
            yield int(instruction.operand), after
        if row.flow is Flow.RETURN:
            # The caller is unknown.
            for place in self._flow.returns:
                yield place, after

    def _depth_after(self, instruction: EncodedInstruction, depth: int | None) -> int | None:
        row = instruction.row
        assert row is not None
        if depth is None or row.syntax in LOSES_DEPTH:
            return None
        effect = self._flow.effect(instruction, self._architecture)
        return depth + effect.pushed - effect.popped

    def _cells_after(self, instruction: EncodedInstruction, stack: _Stack) -> _Cells:
        """Return the certain cells after an instruction; raise ``_UncertainError`` if it may read another cell."""
        cells, row, operand = stack.cells, instruction.row, instruction.operand
        assert row is not None
        match row.syntax:
            case "push <value>":
                return (None if instruction.offset in self._relocated else int(operand), *cells)
            case "xchg":
                return (*reversed(_certain(cells, 2)), *cells[2:])
            case "dup <times>":
                return _certain(cells, 1) * min(int(operand), _KEPT) + cells
            case "dup":
                value, times = _certain(cells, 2)
                if times is None:
                    return (value, *[None] * len(cells[2:]))
                return (value,) * min(times + 1, _KEPT) + cells[2:]
            case "ros <cells>":
                return cells[int(operand) :]
            case "log":
                (count,) = _certain(cells, 1)
                return cells[len(_certain(cells, 1 + _number(count))) :]
            case "push tsp, <n>":
                return (_certain(cells, 1 + _number(int(operand)))[-1], *cells)
            case "push sbp, <n>" if self._flow.keeps_base:
                return (_certain(cells, 1 + _number(stack.base_index(int(operand))))[-1], *cells)
            case "push sbp" if self._flow.keeps_base:
                (n,) = _certain(cells, 1)
                if n is None:
                    raise _UncertainError
                index = stack.base_index(signed(n, self._architecture.word_bits))
                return (_certain(cells, 1 + _number(index))[-1], *cells[1:])
            case "push tsp":
                (n,) = _certain(cells, 1)
                return (_certain(cells, 2 + _number(n))[-1], *cells[1:])
            case "restore tsp":
                _certain(cells, 1)
                return ()
            case syntax if syntax in _READS_ANY:
                raise _UncertainError
        if row.flow is Flow.BRANCH and row.operator != "loop":
            _certain(cells, 1)
            return cells
        effect = self._flow.effect(instruction, self._architecture)
        if not effect.exact:
            raise _UncertainError
        kept = cells[len(_certain(cells, effect.popped)) :]
        if row.syntax in _WRITES_ANY:
            kept = (None,) * len(kept)
        return (None,) * effect.pushed + kept


def _certain(cells: _Cells, count: int) -> _Cells:
    """Return the ``count`` top cells for reading; raise ``_UncertainError`` if one may be unwritten."""
    if count > len(cells):
        raise _UncertainError
    return cells[:count]


def _number(value: int | None) -> int:
    """Return a value that is a number of cells or a depth; raise ``_UncertainError`` if it is unknown or negative."""
    if value is None or value < 0:
        raise _UncertainError
    return value
