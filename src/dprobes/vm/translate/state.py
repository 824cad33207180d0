"""What is known of a machine at a point of a handler before the handler runs."""

from __future__ import annotations

from dataclasses import field, replace

from dprobes.lazydataclass import dataclass
from dprobes.lazynamedtuple import NamedTuple
from dprobes.rpn.isa import RPN_STACK_CELLS

__all__ = ["Atom", "Call", "NotKnownError", "Pointer", "State"]

_CELL_MASK = RPN_STACK_CELLS - 1

Atom = int | str
"""The value of a cell: a number, or the name of the local variable that holds it."""


class Pointer(int):
    """
    Be a TSP or SBP that ``save`` pushed.

    It stays known where paths meet, so that ``restore`` finds it. Other numbers are in variables from there on.
    """


class NotKnownError(Exception):
    """Report that an instruction depends on what only the running handler knows."""


class Call(NamedTuple):
    """Hold what is known of a call frame; the fields are those of ``machine.Frame``."""

    called: int = 0
    return_offset: int = 0
    saved_sbp: int = 0
    handler: int | None = None


@dataclass(slots=True)
class State:
    """
    Hold what is known before the instruction at ``ip``.

    ``tsp`` and ``sbp`` are as in ``Machine``. ``cells`` lacks those that this hit has not written, or has popped; what
    was popped is in ``popped`` until paths meet.
    """

    ip: int
    tsp: int = RPN_STACK_CELLS
    sbp: int = RPN_STACK_CELLS
    calls: tuple[Call, ...] = (Call(),)
    cells: dict[int, Atom] = field(default_factory=dict)
    popped: dict[int, Atom] = field(default_factory=dict)

    def copy(self) -> State:
        """Return a state that changes by itself."""
        return replace(self, cells=dict(self.cells), popped=dict(self.popped))

    def settled(self) -> State:
        """Return the state in a block that begins here: cell n is in the variable ``cN``."""
        cells: dict[int, Atom] = {n: atom if isinstance(atom, Pointer) else f"c{n}" for n, atom in self.cells.items()}
        return replace(self, cells=cells, popped={})

    def key(self) -> tuple[object, ...]:
        """Return what tells this state from others, if it is a settled one."""
        return self.ip, self.tsp, self.sbp, self.calls, frozenset(self.cells.items())

    # The RPN stack, as in ``Machine``

    def push(self, atom: Atom) -> None:
        """Push a value of a word."""
        self.tsp -= 1
        self.set_cell(self.tsp, atom)

    def pop(self) -> Atom:
        """Pop a value; like all that read cells, raise ``NotKnownError`` if the cell is not known."""
        atom = self.peek()
        self.drop(1)
        return atom

    def drop(self, count: int) -> None:
        """Pop values that are of no interest."""
        for position in range(self.tsp, self.tsp + count):
            index = position & _CELL_MASK
            if index in self.cells:
                self.popped[index] = self.cells.pop(index)
        self.tsp += count

    def pop_number(self) -> int:
        """Pop a value that is a known number."""
        atom = self.pop()
        if isinstance(atom, str):
            raise NotKnownError
        return atom

    def peek(self, index: int = 0) -> Atom:
        """Return the value ``index`` below the top."""
        return self.cell(self.tsp + index)

    def poke(self, atom: Atom, index: int = 0) -> None:
        """Change the value ``index`` below the top."""
        self.set_cell(self.tsp + index, atom)

    def cell(self, position: int) -> Atom:
        """Return the value of a cell."""
        index = position & _CELL_MASK
        atom = self.cells.get(index, self.popped.get(index))
        if atom is None:
            raise NotKnownError
        return atom

    def set_cell(self, position: int, atom: Atom) -> None:
        """Change the value of a cell."""
        index = position & _CELL_MASK
        self.cells[index] = atom
        self.popped.pop(index, None)
