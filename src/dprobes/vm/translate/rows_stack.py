"""What the instructions of the RPN stack and of variables write into the function of a handler (``rows``)."""

# ruff: noqa: ARG001 - all templates have the same two parameters

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from dprobes.rpn.isa import RPN_STACK_CELLS
from dprobes.vm.translate.state import Atom, NotKnownError, Pointer

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.vm.translate.function import Writer

    Template = Callable[[Writer, Any], None]

__all__ = ["TEMPLATES", "push_symbol"]

# The RPN stack


def _push_value(w: Writer, value: int) -> None:
    w.state.push(value)


def push_symbol(w: Writer, operand: tuple[str, int]) -> None:
    """Write that the run-time address of a symbol is pushed."""
    symbol, addend = operand
    w.state.push(w.variable(f"context.symbol_address({symbol!r}) + {addend} & {w.mask}"))


def _xchg(w: Writer, operand: int) -> None:
    top, below = w.state.pop(), w.state.pop()
    w.state.push(top)
    w.state.push(below)


def _dup(w: Writer, times: int) -> None:
    value = w.state.peek()
    for _ in range(times):
        w.state.push(value)


def _dup_popped(w: Writer, operand: int) -> None:
    value, count = w.state.pop(), w.state.pop_number()
    if count >= RPN_STACK_CELLS:
        raise NotKnownError
    for _ in range(count + 1):
        w.state.push(value)


def _ros(w: Writer, cells: int) -> None:
    w.state.drop(cells)


def _pointer_templates(name: str) -> dict[str, Template]:
    """Return the templates of one of the stack pointers, and of the cells at a distance from where it points."""
    pointer = attrgetter(name)

    def push(w: Writer, n: int) -> None:
        w.state.push(w.state.cell(pointer(w.state) + n))

    def push_popped(w: Writer, operand: int) -> None:
        push(w, w.state.pop_number())

    def pop(w: Writer, n: int) -> None:
        position = pointer(w.state) + n  # before the pop
        w.state.set_cell(position, w.state.pop())

    def pop_popped(w: Writer, operand: int) -> None:
        value, n = w.state.pop(), w.state.pop_number()
        w.state.set_cell(pointer(w.state) + n, value)

    def copy(w: Writer, n: int) -> None:
        w.state.set_cell(pointer(w.state) + n, w.state.peek())

    def copy_popped(w: Writer, operand: int) -> None:
        copy(w, w.state.pop_number())

    def save(w: Writer, operand: int) -> None:
        w.state.push(Pointer(pointer(w.state) & w.architecture.word_mask))

    def restore(w: Writer, operand: int) -> None:
        setattr(w.state, name, w.state.pop_number())

    return {
        f"push {name}, <n>": push,
        f"push {name}": push_popped,
        f"pop {name}, <n>": pop,
        f"pop {name}": pop_popped,
        f"copy {name}, <n>": copy,
        f"copy {name}": copy_popped,
        f"save {name}": save,
        f"restore {name}": restore,
    }


# Variables


def _variable_templates(name: str, values: str, *, shared: bool = False) -> dict[str, Template]:
    """Return the templates of one kind of variables; ``values`` is the expression for all of them."""

    def checked(w: Writer, index: Atom) -> str:
        found = w.variable(values)
        w.leave_if(f"{index} >= len({found})")
        return found

    def load(w: Writer, index: Atom) -> None:
        w.state.push(w.variable(f"{checked(w, index)}[{index}] & {w.mask}"))

    def store(w: Writer, index: Atom, value: Atom) -> None:
        found = checked(w, index)
        place = f"{found}[{index}]"
        if shared:
            w.line(f"store_variable({found}, {index}, {value}, {w.architecture.word_size})")
        else:
            w.line(f"{place} = {place} & ~{w.mask} | {value}")

    def add(amount: int) -> Template:
        def write(w: Writer, index: Atom) -> None:
            found = checked(w, index)
            place = f"{found}[{index}]"
            if shared:
                w.line(f"add_to_variable({found}, {index}, {amount}, {w.architecture.word_size})")
            else:
                w.line(f"{place} = {place} & ~{w.mask} | {place} + {amount} & {w.mask}")

        return write

    def pop(w: Writer, index: Atom) -> None:
        store(w, index, w.state.pop())

    def pop_popped(w: Writer, operand: int) -> None:
        value, index = w.state.pop(), w.state.pop()
        store(w, index, value)

    def move(w: Writer, index: Atom) -> None:
        store(w, index, w.state.peek())

    def popped(write: Template) -> Template:
        return lambda w, _: write(w, w.state.pop())

    inc, dec = add(1), add(-1)
    return {
        f"push {name}, <{name}>": load,
        f"push {name}": popped(load),
        f"pop {name}, <{name}>": pop,
        f"pop {name}": pop_popped,
        f"move {name}, <{name}>": move,
        f"move {name}": popped(move),
        f"inc {name}, <{name}>": inc,
        f"inc {name}": popped(inc),
        f"dec {name}, <{name}>": dec,
        f"dec {name}": popped(dec),
    }


TEMPLATES: dict[str, Template] = {
    "push <value>": _push_value,
    "xchg": _xchg,
    "dup <times>": _dup,
    "dup": _dup_popped,
    "ros <cells>": _ros,
    **_pointer_templates("sbp"),
    **_pointer_templates("tsp"),
    **_variable_templates("lv", "context.local_variables", shared=True),
    **_variable_templates("gv", "context.global_variables", shared=True),
    **_variable_templates("cv", "context.cpu_variables()", shared=True),
    **_variable_templates("tv", "context.thread_variables()"),
}
