"""What a session lets another one do that takes its place."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from dprobes.engines.interface import ControlledSession

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from dprobes.engines.ebpf.attach.installation import Installation

__all__ = ["ReplaceableSession"]


class ReplaceableSession(ControlledSession):
    """A session that another one may take the place of, if it says so; see ``switchover``."""

    @property
    @abstractmethod
    def is_replaceable(self) -> bool:
        """Whether another session may replace this one."""

    @abstractmethod
    def held_still(self) -> AbstractContextManager[Installation | None]:
        """Change nothing in the kernel meanwhile; return what is there, or None if the session is at its end."""

    @abstractmethod
    def end_replaced(self) -> None:
        """Come to the end, because another session has taken the place of this one."""

    @abstractmethod
    def breakpoints_in(self, descriptor: int) -> frozenset[int]:
        """Return the file offsets of the breakpoints in an open file."""
