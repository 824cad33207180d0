"""What a formatter may say about the probe that a record came from."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """
    Name a probe for people: its module, and the function and offset where it is.

    ``function`` is not empty where the probe stands for many functions, so that a record must say which.
    """

    module: str
    symbol: str
    function: str = ""
