"""
Which symbols of a module answer the questions of a program: those that a compiled file carries.

The answers are the same from these symbols alone. A question that had an answer keeps it, because what was nearer to an
address did not cover it then and does not now; one that had none is settled by the symbol that stands before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.target.symbols import Symbol, SymbolTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dprobes.target.symbols import CodeRange, SymbolSource

__all__ = ["NeededSymbols"]


class NeededSymbols(SymbolTable):
    """Answer questions as every table of symbols, and remember the answers."""

    def __init__(
        self,
        sources: Iterable[SymbolSource],
        *,
        code_range: Callable[[int], CodeRange | None],
        later: Callable[[], Iterable[SymbolSource]] | None = None,
    ) -> None:
        super().__init__(sources, code_range=code_range, later=later)
        self._needed: dict[Symbol, None] = {}
        self._functions: list[Symbol] = []

    @property
    def needed(self) -> tuple[Symbol, ...]:
        """
        The symbols of all answers.

        Functions come in the order in which the sources give them, as far as patterns asked: of several symbols with
        one name and address the first one counts.
        """
        first = dict.fromkeys(symbol for symbol in self._functions if symbol in self._needed)
        others = sorted(
            (symbol for symbol in self._needed if symbol not in first),
            key=lambda symbol: (symbol.address, symbol.name, symbol.kind, symbol.binding, symbol.default_version),
        )
        return (*first, *others)

    def lookup(self, name: str) -> list[Symbol]:
        """Return what the table says, and remember it."""
        found = super().lookup(name)
        self._need(found)
        return found

    def covering(self, link_address: int) -> Symbol | None:
        """Return what the table says, and remember it."""
        found = super().covering(link_address)
        self._need([found] if found is not None else self.preceding(link_address))
        return found

    def starting(self, start: int, end: int) -> list[Symbol]:
        """Return what the table says, and remember it."""
        found = super().starting(start, end)
        self._need(found)
        return found

    def need_matching(self, pattern: str) -> None:
        """Remember all names that match a pattern, and the functions that reach over the beginnings of those."""
        matches = self.matcher(pattern)
        functions = self._functions = self._functions or list(self.functions())
        matching = [symbol for symbol in functions if matches(symbol.name)]
        self._need(matching)
        names = {name for source in self.sources for name in source.names() if matches(name)}
        for name in names.difference(symbol.name for symbol in functions):
            self._need(symbol for source in self.sources for symbol in source.find(name))
        self._need_overlapping(functions, {symbol.address for symbol in matching})

    def _need_overlapping(self, functions: list[Symbol], addresses: set[int]) -> None:
        """Remember the functions that begin before one of the addresses and reach over it."""
        waiting = sorted(addresses, reverse=True)
        for symbol in sorted(functions, key=lambda symbol: symbol.address):
            while waiting and waiting[-1] <= symbol.address:
                waiting.pop()
            if waiting and symbol.address + symbol.size > waiting[-1]:
                self._need([symbol])

    def _need(self, symbols: Iterable[Symbol]) -> None:
        self._needed.update(dict.fromkeys(symbols))
