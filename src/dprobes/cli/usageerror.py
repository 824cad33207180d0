"""Errors of usage, made without click where none occurs: importing it takes a tenth of a start."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from click import UsageError

__all__ = ["usage_error"]


def usage_error(message: str) -> UsageError:
    """Return the error to raise for a line that cannot be meant."""
    from click import UsageError

    return UsageError(message)
