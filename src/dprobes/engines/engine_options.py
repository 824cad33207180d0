"""What a user says about engines: what concerns all of them, and what single engines have besides."""

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
    What engines have found out about this machine.

    Whoever inserts several programs keeps one, so that engines do not find out the same for each.
    """

    def __init__(self) -> None:
        self._known: dict[type[Any], Any] = {}

    def recall(self, kind: type[T]) -> T:
        """Return the object of a class that stands for what is known; the first time a new one."""
        if kind not in self._known:
            self._known[kind] = kind()
        known: T = self._known[kind]
        return known


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the user says about the engine of an insertion; see the options of ``run``."""

    allow_write: bool = False
    symbols: SymbolProvider = OWN_SYMBOLS
    debugger: tuple[str, ...] | None = None
    core_directory: str = "."
    overhead: float | None = None
    """Percent of a CPU that hits may take (``overhead``), 0 for no limit; None: what fits the scope."""
    replaceable: bool = False
    """Whether a program can be replaced by another one while it runs."""
    traces_already: bool = False
    """Whether the process in scope is traced by ourselves, for a program that is to be replaced."""
    tracers: frozenset[int] = frozenset()
    """The processes that trace others for programs beside which this one may be inserted."""
    present: tuple[object, ...] = ()
    """The sessions beside which this one may be inserted."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """Options of single engines by name; an engine ignores those of others, unless its row in the registry says."""
    knowledge: MachineKnowledge = field(default_factory=MachineKnowledge)
