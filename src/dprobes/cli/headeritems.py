"""The header items of records, as ``--log`` names them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dprobes.cli.usageerror import usage_error
from dprobes.record.layout import Item

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ALL_ITEMS", "LOG_ITEMS", "log_items_of"]

LOG_ITEMS = {
    "PROCNAME": Item.PROCESS_NAME,
    "PID": Item.PID,
    "UID": Item.UID,
    "CSEIP": Item.CS | Item.IP,
    "SSESP": Item.SS | Item.SP,
    "TSC": Item.TIME,
    "TID": Item.TID,
}
"""The names that ``--log`` takes; the first six are the original's, for x86."""

ALL_ITEMS = Item.PROCESS_NAME | Item.PID | Item.UID | Item.CS | Item.IP | Item.SS | Item.SP | Item.TIME | Item.TID


def log_items_of(
    names: Sequence[str], *, is_tree: bool, all_by_default: bool = False, for_people: bool = False
) -> Item:
    """
    Return the items that the values of ``--log`` mean; ``is_tree`` says that a run is about one process tree.

    ``all_by_default`` says that whatever takes the records wants all items, if not told otherwise; ``for_people`` that
    they are printed as lines, which tell when, and in which process.
    """
    items = Item.MAJOR | Item.MINOR
    if for_people and not names:
        items |= Item.PROCESS_NAME | Item.PID | Item.TIME
    if not is_tree:
        items |= Item.PROCESS_NAME | Item.PID  # a record of some process says nothing without them
    if all_by_default and not names:
        items |= ALL_ITEMS | Item.CPU
    if os.sysconf("SC_NPROCESSORS_ONLN") > 1:
        items |= Item.CPU
    for name in ",".join(names).replace(" ", ",").upper().split(","):
        if name == "ALL":
            items |= ALL_ITEMS
        elif name in LOG_ITEMS:
            items |= LOG_ITEMS[name]
        elif name:
            from dprobes.diagnostics import did_you_mean

            hint = did_you_mean(name, [item.lower() for item in LOG_ITEMS]) or f"write {', '.join(LOG_ITEMS)}, or ALL"
            raise usage_error(f"--log knows no item '{name.lower()}'; {hint}")
    return items
