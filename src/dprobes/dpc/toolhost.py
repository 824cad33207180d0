"""What blocks of the tool act on, as their interpreter asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from dprobes.dpc.typedtree import typed

__all__ = ["ToolHost"]


class ToolHost(Protocol):
    """What blocks of the tool act on; variables and tables are those of the probes."""

    def variable(self, kind: typed.VariableKind, index: int) -> int:
        """Return the 64 bits of a variable."""

    def set_variable(self, kind: typed.VariableKind, index: int, value: int) -> None:
        """Set a variable."""

    def table_value(self, table: int, key: bytes) -> int:
        """Return the number under a key, 0 if there is nothing."""

    def table_kept(self, table: int, key: bytes) -> bytes:
        """Return the string or call stack under a key, as it lies in memory; zeros if there is nothing."""

    def tally(self, table: int, key: bytes, value: int) -> None:
        """Take a signed number into a table."""

    def keep(self, table: int, key: bytes, value: bytes) -> None:
        """Let a table keep a string or call stack, as it lies in memory."""

    def delete(self, table: int, key: bytes) -> None:
        """Take a key out of a table."""

    def clear(self, table: int) -> None:
        """Take all keys out of a table."""

    def show(self, table: int, rows: int | None) -> None:
        """Print at most ``rows`` rows of a table."""

    def cat(self, path: str) -> None:
        """Print what a file says."""

    def print(self, template: str, data: bytes) -> None:
        """Print what a template makes of the bytes of a record."""

    def quit(self) -> None:
        """Ask for the end of the run."""

    def system(self, name: str) -> int:
        """Return ``pid``, ``tid``, ``uid``, ``procid`` or ``time`` of the tool."""
