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

    from dprobes.keyed.store import KeyedStore
    from dprobes.rpn.tables import Key

    Rule = Callable[[Machine, Any], None]

__all__ = ["RULES"]


def _pop_key(machine: Machine, store: KeyedStore) -> bytes:
    """Pop the cells of the keys, the last one first, and return the key in memory."""
    keys = store.table.keys
    popped = [_popped(machine, key) for key in reversed(keys)]
    return b"".join([_part(machine, key, cells) for key, cells in zip(keys, reversed(popped), strict=True)])


def _popped(machine: Machine, key: Key) -> list[int]:
    """Pop the cells of a key, the top one first."""
    return [machine.pop() for _ in range(key.popped(machine.word_size))]


def _part(machine: Machine, key: Key, cells: Sequence[int]) -> bytes:
    """Return a key, or what is kept, in memory; ``cells`` were popped for it."""
    match key.kind:
        case KeyKind.STRING | KeyKind.CUT_STRING:
            text = read_string(machine.context, cells[0], key.size, machine.mask).removesuffix(b"\0")
            return text.ljust(key.bytes, b"\0")
        case KeyKind.BYTES:
            return machine.context.read(cells[0], key.size).ljust(key.bytes, b"\0")
        case KeyKind.TEXT | KeyKind.CUT_TEXT:
            return b"".join([cell.to_bytes(machine.word_size, "little") for cell in cells])
        case KeyKind.LONG | KeyKind.SIGNED_LONG | KeyKind.FRAMES | KeyKind.USER_FRAMES:
            return _words(_wide_numbers(machine, cells), key)
        case KeyKind.COMM:
            return machine.context.process_name()[: PROCESS_NAME_SIZE - 1].ljust(PROCESS_NAME_SIZE, b"\0")
        case KeyKind.USER_STACK:
            return _words([machine.context.pid(), *machine.context.user_stack(key.size)[: key.size]], key)
        case KeyKind.KERNEL_STACK:
            return _words(machine.context.kernel_stack()[: key.size], key)
        case KeyKind.SIGNED:
            return signed(cells[0], machine.bits).to_bytes(8, sys.byteorder, signed=True)
        case _:
            return (cells[0] & machine.mask).to_bytes(8, sys.byteorder)


def _wide_numbers(machine: Machine, cells: Sequence[int]) -> list[int]:
    """Return the numbers of 64 bits in cells, in each the low word first."""
    if machine.word_size == 8:
        return list(cells)
    return [low | high << machine.bits for low, high in zip(cells[::2], cells[1::2], strict=True)]


def _words(addresses: Sequence[int], key: Key) -> bytes:
    return b"".join([address.to_bytes(8, sys.byteorder) for address in addresses]).ljust(key.bytes, b"\0")


def _tally(machine: Machine, number: int) -> None:
    store = machine.context.keyed_tables[number]
    kept = store.table.value
    if kept is None:
        value = signed(machine.pop(), machine.bits) if store.table.kind.takes_value else 0
        store.tally(_pop_key(machine, store), value)
        return
    cells = _popped(machine, kept)
    key = _pop_key(machine, store)
    if kept.kind is KeyKind.LONG:
        store.tally(key, signed(_wide_numbers(machine, cells)[0], 64))
    else:
        store.keep(key, _part(machine, kept, cells))


def _push_table(machine: Machine, number: int) -> None:
    store = machine.context.keyed_tables[number]
    key, kept = _pop_key(machine, store), store.table.value
    if kept is None:
        machine.push(store.value(key))
    elif kept.kind.is_string:
        found, size = store.kept(key), machine.word_size
        for place in reversed(range(0, len(found), size)):
            machine.push(int.from_bytes(found[place : place + size], "little"))
    elif store.table.keeps_bytes:
        for address in reversed(memoryview(store.kept(key)).cast("Q").tolist()):
            machine.push_wide(address, 64)
    else:
        machine.push_wide(store.value(key), 64)


def _delete(machine: Machine, number: int) -> None:
    store = machine.context.keyed_tables[number]
    store.delete(_pop_key(machine, store))


RULES: dict[str, Rule] = {
    "tally <table>": _tally,
    "push table, <table>": _push_table,
    "delete <table>": _delete,
}
