"""What a conversion asks about the machine that the script is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Machine", "NoMachine"]


class Machine(Protocol):
    """A machine, or one of which nothing is known (``NoMachine``)."""

    def library(self, name: str) -> str:
        """Return the name of the library that ``libc`` or the like is; the same name if there is none."""

    def tracepoints(self, subsystem: str, pattern: str) -> Sequence[str]:
        """Return the names of tracepoints that match a pattern of a shell."""

    def arrays(self, subsystem: str, name: str) -> Mapping[str, int]:
        """Return the fields of a tracepoint that are arrays, with their sizes in bytes; 0 if a record says the size."""

    def pointers(self, subsystem: str, name: str) -> Mapping[str, str]:
        """Return the fields of a tracepoint that are pointers to structures, with their types in C."""


class NoMachine:
    """A machine of which nothing is known."""

    def library(self, name: str) -> str:
        """Return the name."""
        return name

    def tracepoints(self, subsystem: str, pattern: str) -> Sequence[str]:  # noqa: ARG002 - what the protocol says
        """Return none."""
        return ()

    def arrays(self, subsystem: str, name: str) -> Mapping[str, int]:  # noqa: ARG002 - what the protocol says
        """Return none."""
        return {}

    def pointers(self, subsystem: str, name: str) -> Mapping[str, str]:  # noqa: ARG002 - what the protocol says
        """Return none."""
        return {}
