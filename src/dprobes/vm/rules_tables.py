"""
What the instructions of keyed tables do.

All operands are popped before a key is made of them, so that a string that cannot be read leaves the stack as it is
after every exception, and the table as it was.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from dprobes.rpn.arithmetic import signed
from dprobes.rpn.isa import PROCESS_NAME_SIZE
from dprobes.rpn.tables import KeyKind
from dprobes.vm.machine import Machine, read_string

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.keyed.store import TableStore
    from dprobes.rpn.tables import Key

    Rule = Callable[[Machine, Any], None]

__all__ = ["RULES"]


def _pop_key(machine: Machine, store: TableStore) -> bytes:
    """Pop the cells of the keys, the last one first, and return the key in memory."""
    keys = store.table.keys
    popped = iter([machine.pop() for _ in range(store.table.cells)][::-1])
    return b"".join([_part(machine, key, next(popped) if key.kind.is_popped else 0) for key in keys])


def _part(machine: Machine, key: Key, cell: int) -> bytes:
    match key.kind:
        case KeyKind.STRING:
            text = read_string(machine.context, cell, key.size, machine.mask).removesuffix(b"\0")
            return text.ljust(key.bytes, b"\0")
        case KeyKind.COMM:
            return machine.context.process_name()[: PROCESS_NAME_SIZE - 1].ljust(PROCESS_NAME_SIZE, b"\0")
        case KeyKind.USER_STACK:
            return _words([machine.context.pid(), *machine.context.user_stack(key.size)[: key.size]], key)
        case KeyKind.KERNEL_STACK:
            return _words(machine.context.kernel_stack()[: key.size], key)
        case _:
            return (cell & machine.mask).to_bytes(8, sys.byteorder)


def _words(addresses: Sequence[int], key: Key) -> bytes:
    return b"".join([address.to_bytes(8, sys.byteorder) for address in addresses]).ljust(key.bytes, b"\0")


def _tally(machine: Machine, number: int) -> None:
    store = machine.context.keyed_tables[number]
    value = signed(machine.pop(), machine.bits) if store.table.kind.takes_value else 0
    store.tally(_pop_key(machine, store), value)


def _push_table(machine: Machine, number: int) -> None:
    store = machine.context.keyed_tables[number]
    machine.push(store.value(_pop_key(machine, store)))


def _delete(machine: Machine, number: int) -> None:
    store = machine.context.keyed_tables[number]
    store.delete(_pop_key(machine, store))


RULES: dict[str, Rule] = {
    "tally <table>": _tally,
    "push table, <table>": _push_table,
    "delete <table>": _delete,
}
