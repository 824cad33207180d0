"""Options for the engine of an insertion: common ones, and those of single engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from dprobes.target.probed_module import OWN_SYMBOLS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.target.probed_module import SymbolProvider

__all__ = ["EngineOptions", "MachineKnowledge"]

T = TypeVar("T")


class MachineKnowledge:
    """
    Cache of the engines' findings about this machine.

    A caller that inserts several programs passes the same object, so that engines do not repeat their checks.
    """

    def __init__(self) -> None:
        self._known: dict[type[Any], Any] = {}

    def recall(self, kind: type[T]) -> T:
        """Return the one object of class ``kind`` in this cache; the first call creates it."""
        if kind not in self._known:
            self._known[kind] = kind()
        known: T = self._known[kind]
        return known


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """User's options for the engine of an insertion; see the options of ``run``."""

    allow_write: bool = False
    symbols: SymbolProvider = OWN_SYMBOLS
    debugger: tuple[str, ...] | None = None
    core_directory: str = "."
    overhead: float | None = None
    """Maximum percentage of a CPU that hits may take (``--overhead``); 0: no limit, None: the scope's default."""
    replaceable: bool = False
    """True if the caller may later replace this program while it runs."""
    traces_already: bool = False
    """True if this tool already traces the process in scope, for the program that this one replaces."""
    tracers: frozenset[int] = frozenset()
    """Process ids of the tracers of other programs, with which this one may be attached at the same time."""
    present: tuple[object, ...] = ()
    """Attachments with which this one may be attached at the same time."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """
    Options of single engines by name; an engine ignores options of others, except those in ``demands`` of the registry.
    """
    knowledge: MachineKnowledge = field(default_factory=MachineKnowledge)
