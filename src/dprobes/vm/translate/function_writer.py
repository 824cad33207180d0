"""
Writer of the Python source of a handler's function.

The writer follows the paths through the RPN code with the part of the machine's state that is known before the handler
runs (``State``). These are TSP and SBP, the call frames with their exception handlers, and for each cell of the RPN
stack its number or local variable. So ``dup`` and ``sx`` need no code in the function, and a procedure is written once
for each place that calls it. A *block* begins where paths can meet, one for each state in which it is reached::

        push r, arg0         def handler(point, context):
    l:  push mem, u64            jumps = 0
        jnz l                    ...
        exit                     block = 0
                                 while True:
                                     if block == 0:
                                         v0 = context.register(10, user=False) & 0xffffffffffffffff
                                         c1023 = v0
                                         block = 1
                                         continue
                                     if block == 1:
                                         try:
                                             v1 = int.from_bytes(context.read(c1023, 8), 'little')
                                         except FAULTS:
                                             return leave(0, point, context, locals())
                                         if v1:
                                             if jumps == point.jmpmax:
                                                 return leave(1, point, context, locals())
                                             jumps += 1
                                             c1023 = v1
                                             block = 1
                                             continue
                                         return new(Outcome, (EXIT, log, b'', major, minor, 0, 0, 0, False))

``leave`` creates a machine in the state of ``Function.exits``; the interpreter continues it at the instruction that the
function did not execute. The function leaves for all RPN exceptions and rare instructions, which only the rules of
``vm`` define. An instruction changes nothing before the last point at which it can leave.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from dprobes.rpn.instruction_encoding import decode_one
from dprobes.rpn.instruction_set import RPN_STACK_CELLS, Flow

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.arch import Architecture
    from dprobes.rpn.instruction_encoding import CodeImage, EncodedInstruction
    from dprobes.rpn.instruction_set import Row
    from dprobes.vm.interpreter import Step, Steps

__all__ = ["Atom", "Call", "Function", "NotKnownError", "Pointer", "Writer"]

# The known part of a machine's state at a point of a handler, before the handler runs.


_CELL_MASK = RPN_STACK_CELLS - 1

Atom = int | str
"""The value of a cell: a number, or the name of the local variable that holds it."""


class Pointer(int):
    """
    A value of TSP or SBP that ``save`` pushed.

    It remains known where paths meet, for ``restore``. Other numbers become variables there.
    """


class NotKnownError(Exception):
    """Error that an instruction needs a value that is known only when the handler runs."""


class Call(NamedTuple):
    """Known part of a call frame. The fields are those of ``rpn_machine.Frame``."""

    called: int = 0
    return_offset: int = 0
    saved_sbp: int = 0
    handler: int | None = None


@dataclass(slots=True)
class State:
    """
    Known part of the state before the instruction at ``ip``.

    ``tsp`` and ``sbp`` are as in ``Machine``. ``cells`` lacks cells that the handler has not written or has popped.
    Popped cells are in ``popped`` until paths meet.
    """

    ip: int
    tsp: int = RPN_STACK_CELLS
    sbp: int = RPN_STACK_CELLS
    calls: tuple[Call, ...] = (Call(),)
    cells: dict[int, Atom] = field(default_factory=dict)
    popped: dict[int, Atom] = field(default_factory=dict)

    def copy(self) -> State:
        """Return a copy of the state for another path: changes of one do not affect the other."""
        return replace(self, cells=dict(self.cells), popped=dict(self.popped))

    def settled(self) -> State:
        """
        Return the state at the start of a block where paths meet: cell n is in the local variable ``cN`` (c1023).

        Only values of TSP and SBP (``Pointer``) remain known.
        """
        cells: dict[int, Atom] = {n: atom if isinstance(atom, Pointer) else f"c{n}" for n, atom in self.cells.items()}
        return replace(self, cells=cells, popped={})

    def key(self) -> tuple[object, ...]:
        """Return a hashable key that identifies the state, which must be a result of ``settled``."""
        return self.ip, self.tsp, self.sbp, self.calls, frozenset(self.cells.items())

    # The RPN stack, as in ``Machine``

    def push(self, atom: Atom) -> None:
        """Push a cell whose value is known to be ``atom``: a number, or the name of a local variable."""
        self.tsp -= 1
        self.set_cell(self.tsp, atom)

    def pop(self) -> Atom:
        """Pop a value; like all methods that read cells, raise ``NotKnownError`` if the cell is not known."""
        atom = self.peek()
        self.drop(1)
        return atom

    def drop(self, count: int) -> None:
        """Pop ``count`` cells without reading their values."""
        for position in range(self.tsp, self.tsp + count):
            index = position & _CELL_MASK
            if index in self.cells:
                self.popped[index] = self.cells.pop(index)
        self.tsp += count

    def pop_number(self) -> int:
        """Pop a known number; raise ``NotKnownError`` for a variable."""
        atom = self.pop()
        if isinstance(atom, str):
            raise NotKnownError
        return atom

    def peek(self, index: int = 0) -> Atom:
        """Return the value of the cell ``index`` cells below the top of the stack; raise as ``cell`` does."""
        return self.cell(self.tsp + index)

    def poke(self, atom: Atom, index: int = 0) -> None:
        """Change the value of the cell ``index`` cells below the top of the stack."""
        self.set_cell(self.tsp + index, atom)

    def cell(self, position: int) -> Atom:
        """
        Return the value of the cell ``position``, an index in the stack's memory.

        Raise ``NotKnownError`` if the handler has not written it.
        """
        index = position & _CELL_MASK
        atom = self.cells.get(index, self.popped.get(index))
        if atom is None:
            raise NotKnownError
        return atom

    def set_cell(self, position: int, atom: Atom) -> None:
        """Change the value of the cell ``position``, an index in the stack's memory."""
        index = position & _CELL_MASK
        self.cells[index] = atom
        self.popped.pop(index, None)


_SIZE_MAX = 16_000
"""
Maximum size of a function. The interpreter executes the paths for which there is no room.

The size is the number of characters of the source, plus ``_INSTRUCTION_SIZE`` for each instruction.
"""

_INSTRUCTION_SIZE = 20
"""Size that each instruction adds to the size of its source. Each known cell adds 1."""

_DEPTH_MAX = 20
"""Maximum nesting of branches before they become blocks."""


class Function(NamedTuple):
    """The source of the Python function ``handler``, the objects that it names, and the states in which it leaves."""

    source: str
    names: dict[str, object]
    exits: tuple[State, ...]


class Writer:
    """
    Writer of the function of the handler that starts at byte ``start`` of an image.

    ``steps`` are those of the interpreter. ``write`` writes one instruction (``instruction_templates``). Without
    ``ends``, the interpreter executes the instructions that end the handler.
    """

    def __init__(
        self,
        image: CodeImage,
        architecture: Architecture,
        steps: Steps,
        start: int,
        write: Callable[[Writer, Row, Step], None],
        *,
        ends: bool,
    ) -> None:
        self.architecture = architecture
        self.bits: int = architecture.word_bits
        self.mask = f"{architecture.word_mask:#x}"
        self.tables = image.tables
        self.ends = ends
        self.keeps_elapsed = False
        """True if the function has a variable for the time since the entry of the call, for later reads."""
        self.state = State(start)
        self._image = image
        self._steps = steps
        self._write = write
        self._meetings = self._find_meetings(start)
        self._numbers = {self.state.key(): 0}
        self._blocks = [self.state]
        self._has_meetings = False
        self._lines: list[str] = []
        self._size = 0
        self._depth = 0
        self._ended = False
        self._variables = 0
        self._names: dict[str, object] = {}
        self._before = self.state
        self._exits: list[State] = []

    def function(self) -> Function:
        """
        Return the source of the Python function ``handler(point, context)``, which does the same as the RPN handler.

        The result also has the objects that it names, and the states in which the interpreter continues.
        """
        lines = ["jumps = 0", "log = b''", "major = point.major", "minor = point.minor"]
        bodies = [self._body(block) for block in self._blocks]  # ``_body`` appends to the blocks
        if self.keeps_elapsed:
            lines.append("elapsed = None")
        if self._has_meetings:
            lines += ["block = 0", "while True:"]
            for number, body in enumerate(bodies):
                lines += [f"    if block == {number}:", *(f"        {line}" for line in body)]
        else:
            lines += bodies[0]
        source = "def handler(point, context):\n" + "".join(f"    {line}\n" for line in lines)
        return Function(source, self._names, tuple(self._exits))

    def _body(self, block: State) -> list[str]:
        self._lines, self.state = [], block.copy()
        self._instruction()
        self._path()
        return self._lines

    # Paths

    def _path(self) -> None:
        """Write code for the instructions from the current state on, until the path ends or another block begins."""
        while not self._ended:
            if self.state.ip in self._meetings or self._depth > _DEPTH_MAX:
                self._go_to_block()
            else:
                self._instruction()
        self._ended = False

    def _instruction(self) -> None:
        self._before = self.state.copy()
        instruction = self._decode(self.state.ip)
        self._size += _INSTRUCTION_SIZE + len(self.state.cells)
        if instruction.row is None or self._size > _SIZE_MAX:
            self._leave()
            return
        length = len(self._lines)
        self.state.ip = instruction.end
        try:
            self._write(self, instruction.row, self._steps[instruction.offset])
        except NotKnownError:
            del self._lines[length:]
            self._leave()

    def _go_to_block(self) -> None:
        block = self.state.settled()
        moves = [(target, self.state.cells[n]) for n, target in block.cells.items() if target != self.state.cells[n]]
        if moves:
            self.line(f"{', '.join(f'{target}' for target, _ in moves)} = {', '.join(f'{atom}' for _, atom in moves)}")
        number = self._numbers.setdefault(block.key(), len(self._blocks))
        if number == len(self._blocks):
            self._blocks.append(block)
        self.line(f"block = {number}")
        self.end("continue")
        self._has_meetings = True

    def _leave(self) -> None:
        self.end(self._exit())

    def _find_meetings(self, start: int) -> set[int]:
        """
        Return the offsets of the instructions at which paths from ``start`` meet.

        Calls do not count: a procedure is reached in a different state from each call.
        """
        arrivals = Counter([start])
        found, pending = {start}, [start]
        while pending and len(found) < _SIZE_MAX // _INSTRUCTION_SIZE:
            instruction = self._decode(pending.pop())
            flow = Flow.END if instruction.row is None else instruction.row.flow
            following: list[int] = []
            if flow in (Flow.NEXT, Flow.BRANCH, Flow.CALL):
                following.append(instruction.end)
            if flow in (Flow.JUMP, Flow.BRANCH):
                following.append(int(instruction.operand))
            arrivals.update(following)
            if flow is Flow.CALL:
                following.append(int(instruction.operand))
            pending += set(following) - found
            found.update(following)
        return {offset for offset, ways in arrivals.items() if ways > 1}

    def _decode(self, offset: int) -> EncodedInstruction:
        image = self._image
        return decode_one(image.data, offset, image.word_size, image.byte_order)

    # Methods for templates

    def line(self, text: str) -> None:
        """Append a line to the source, indented for the path that is being written."""
        self._lines.append("    " * self._depth + text)
        self._size += len(self._lines[-1])

    def new_variable(self) -> str:
        """Return the name of a local variable that the function does not use yet."""
        self._variables += 1
        return f"v{self._variables - 1}"

    def variable(self, expression: str) -> str:
        """Write the assignment of an expression to a new variable, and return the variable."""
        name = self.new_variable()
        self.line(f"{name} = {expression}")
        return name

    def attempt(self, assignment: str) -> None:
        """Write an assignment that may raise a fault, after which the interpreter executes the instruction."""
        self.line("try:")
        self.line(f"    {assignment}")
        self.line("except FAULTS:")
        self.line(f"    {self._exit()}")

    def name_of(self, value: object) -> str:
        """Return a name for an object that the function uses; the same object always has the same name."""
        name = f"k{len(self._names)}"
        self._names[name] = value
        return name

    def push_wide(self, variable: str, bits: int) -> None:
        """Write the push of a value of ``bits`` bits, as ``Machine.push_wide`` does."""
        for cell in reversed(range(-(-bits // self.bits))):
            whole = bits == self.bits
            self.state.push(variable if whole else self.variable(f"{variable} >> {cell * self.bits} & {self.mask}"))

    # Continuation of instructions

    def jump(self, target: int) -> None:
        """Write a jump to ``target``, which is charged to the jump budget."""
        self.leave_if("jumps == point.jmpmax")
        self.line("jumps += 1")
        self.state.ip = target

    def branch(self, condition: str, target: int, *, charged: bool = False) -> None:
        """
        Write a jump to the instruction ``target`` that is taken if ``condition``, a Python expression, is true.

        It charges the jump budget, unless the caller has done so (``charged``).
        """
        self.line(f"if {condition}:")
        otherwise = self.state
        self.state = otherwise.copy()
        self._depth += 1
        if charged:
            self.state.ip = target
        else:
            self.jump(target)
        self._path()
        self._depth -= 1
        self.state = otherwise

    def leave_if(self, condition: str) -> None:
        """Write a conditional exit to the interpreter, which executes the present instruction."""
        self.line(f"if {condition}:")
        self.line(f"    {self._exit()}")

    def end(self, text: str) -> None:
        """Write the statement ``text`` as the last one of the current path, which has no further instructions."""
        self.line(text)
        self._ended = True

    def _exit(self) -> str:
        if not self._exits or self._exits[-1] is not self._before:
            self._exits.append(self._before)
        return f"return leave({len(self._exits) - 1}, point, context, locals())"
