"""What the instructions of the RPN stack and of variables write into the function of a handler (``rows``)."""

# ruff: noqa: ARG001 - all templates have the same two parameters

from __future__ import annotations

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


def _push_sbp(w: Writer, operand: int) -> None:
    _push_sbp_n(w, w.state.pop_number())


def _pop_sbp(w: Writer, operand: int) -> None:
    value, n = w.state.pop(), w.state.pop_number()
    w.state.set_cell(w.state.sbp + n, value)


def _copy_sbp(w: Writer, operand: int) -> None:
    _copy_sbp_n(w, w.state.pop_number())


def _push_sbp_n(w: Writer, n: int) -> None:
    w.state.push(w.state.cell(w.state.sbp + n))


def _pop_sbp_n(w: Writer, n: int) -> None:
    w.state.set_cell(w.state.sbp + n, w.state.pop())


def _copy_sbp_n(w: Writer, n: int) -> None:
    w.state.set_cell(w.state.sbp + n, w.state.peek())


def _push_tsp(w: Writer, operand: int) -> None:
    _push_tsp_n(w, w.state.pop_number())


def _pop_tsp(w: Writer, operand: int) -> None:
    value, n = w.state.pop(), w.state.pop_number()
    w.state.set_cell(w.state.tsp + n, value)


def _copy_tsp(w: Writer, operand: int) -> None:
    _copy_tsp_n(w, w.state.pop_number())


def _push_tsp_n(w: Writer, n: int) -> None:
    w.state.push(w.state.cell(w.state.tsp + n))


def _pop_tsp_n(w: Writer, n: int) -> None:
    position = w.state.tsp + n
    w.state.set_cell(position, w.state.pop())


def _copy_tsp_n(w: Writer, n: int) -> None:
    w.state.set_cell(w.state.tsp + n, w.state.peek())


def _save_sbp(w: Writer, operand: int) -> None:
    w.state.push(Pointer(w.state.sbp & w.architecture.word_mask))


def _restore_sbp(w: Writer, operand: int) -> None:
    w.state.sbp = w.state.pop_number()


def _save_tsp(w: Writer, operand: int) -> None:
    w.state.push(Pointer(w.state.tsp & w.architecture.word_mask))


def _restore_tsp(w: Writer, operand: int) -> None:
    w.state.tsp = w.state.pop_number()


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
    "push sbp": _push_sbp,
    "pop sbp": _pop_sbp,
    "copy sbp": _copy_sbp,
    "push sbp, <n>": _push_sbp_n,
    "pop sbp, <n>": _pop_sbp_n,
    "copy sbp, <n>": _copy_sbp_n,
    "push tsp": _push_tsp,
    "pop tsp": _pop_tsp,
    "copy tsp": _copy_tsp,
    "push tsp, <n>": _push_tsp_n,
    "pop tsp, <n>": _pop_tsp_n,
    "copy tsp, <n>": _copy_tsp_n,
    "save sbp": _save_sbp,
    "restore sbp": _restore_sbp,
    "save tsp": _save_tsp,
    "restore tsp": _restore_tsp,
    **_variable_templates("lv", "context.local_variables"),
    **_variable_templates("gv", "context.global_variables", shared=True),
    **_variable_templates("cv", "context.cpu_variables()"),
}
