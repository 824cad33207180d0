"""The option ``--skip-damaged`` of verbs that read trace files, and what is said of damage."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from dprobes.cli import console

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.trace.content import Damage

__all__ = ["DamageReport", "skip_damaged_option"]

_SAID_MAX = 5
"""Damaged places of a file that are said one by one."""


def skip_damaged_option() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option that makes a reader go on behind damage."""
    return click.option(
        "--skip-damaged", is_flag=True, help="Skip damaged parts of trace files, and report how much was skipped."
    )


class DamageReport:
    """Warn of damage that is skipped: of the first places one by one, of all others by ``finish``."""

    def __init__(self) -> None:
        self._places: Counter[str] = Counter()
        self._unsaid: Counter[str] = Counter()

    def __call__(self, damage: Damage) -> None:
        """Note a place."""
        self._places[damage.file] += 1
        if self._places[damage.file] > _SAID_MAX:
            self._unsaid[damage.file] += damage.size
            return
        console.warning(f"{damage.problem}: {damage.size} bytes from byte {damage.offset} on are skipped")
        if not damage.offset:
            console.warning(f"'{damage.file}' described its clock there: times may be wrong")

    def finish(self) -> None:
        """Say what has not been said."""
        for file, size in self._unsaid.items():
            count = self._places[file] - _SAID_MAX
            console.warning(f"'{file}': {size} bytes at {count} more damaged places are skipped")
        self._unsaid.clear()
