"""The number of deselected tests, which pytest-xdist does not transfer from its workers."""

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
    """A test that a worker has deselected, in the form of a report: plugins read its ``__dict__``."""

    nodeid: str


class DeselectionCount:
    """A plugin that transfers the names of deselected tests from one worker; all workers collect the same ones."""

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
