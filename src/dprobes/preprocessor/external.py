"""
What the package and another preprocessor, such as ``gcc -E``, say to each other: plain data.

How the other preprocessor is run is not known here; ``dprobes.cli.externalcpp`` does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ExternalPreprocessor", "ExternalRequest", "ExternalResult"]


@dataclass(frozen=True, slots=True)
class ExternalRequest:
    """Ask for ``text`` to be preprocessed with these definitions (name, value) and directories for ``#include``."""

    text: str
    defines: tuple[tuple[str, str], ...]
    include_dirs: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class ExternalResult:
    """Hold what the preprocessor wrote and how it ended; ``command`` is its name in messages."""

    command: str
    exit_status: int
    stdout: str
    stderr: str


ExternalPreprocessor: TypeAlias = Callable[[ExternalRequest], ExternalResult]
"""Runs another preprocessor; raises ``SourceError`` if it cannot be run."""
