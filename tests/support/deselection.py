"""How many tests were deselected: pytest-xdist does not tell what its workers leave out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DeselectionCount"]

_KEY = "deselected"


@dataclass(frozen=True)
class _Left:
    """A test that a worker has left out: plugins take it for a report, and look into its ``__dict__``."""

    nodeid: str


class DeselectionCount:
    """What hands the names of the deselected tests on from a worker; all workers collect the same ones."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._names: list[str] = []

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self._names += [item.nodeid for item in items]

    def pytest_sessionfinish(self) -> None:
        if (output := getattr(self._config, "workeroutput", None)) is not None:
            output[_KEY] = self._names

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        names = getattr(node, "workeroutput", {}).get(_KEY)
        if names and reporter is not None:
            reporter.stats[_KEY] = [_Left(name) for name in names]
