"""
Which symbols of a kernel answer the questions of a program: those that a compiled file carries.

The answers are the same from these symbols alone: what was nearest before an address is so among fewer as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.target.kernel.kallsyms import Kallsyms

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dprobes.target.kernel.kallsyms import KernelSymbol

__all__ = ["NeededKallsyms"]


class NeededKallsyms(Kallsyms):
    """Answer questions as every list of symbols, and remember the answers."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._needed: set[KernelSymbol] = set()

    @property
    def needed(self) -> tuple[KernelSymbol, ...]:
        """The symbols of all answers, by address."""
        return tuple(sorted(self._needed, key=lambda symbol: (symbol.address, symbol.name, symbol.letter)))

    def find(self, name: str, module: str | None = None) -> list[KernelSymbol]:
        """Return what the list says, and remember it."""
        found = super().find(name, module)
        self._needed.update(found)
        return found

    def matching(self, pattern: str, module: str) -> Iterator[KernelSymbol]:
        """Give what the list says, and remember it."""
        for symbol in super().matching(pattern, module):
            self._needed.add(symbol)
            yield symbol

    def covering(self, address: int) -> KernelSymbol | None:
        """Return what the list says, and remember it."""
        found = super().covering(address)
        self._needed.update([found] if found is not None else ())
        return found

    def need_names(self, addresses: Iterable[int]) -> None:
        """Remember all names of the code that begins at these addresses: ftrace knows it by any of them."""
        for address in addresses:
            for name in self.names_at(address):
                self._needed.update(symbol for symbol in super().find(name) if symbol.address == address)
