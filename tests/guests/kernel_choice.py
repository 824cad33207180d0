"""
The choice of a kernel for tests that need only one: each kernel gets a part of them, the same on every machine.

Tests that depend on the kernel run on all of them: those with the marker ``each_kernel`` or ``requires_feature``. A
test that names its kernels runs on these. Tests with the marker ``machine`` run on the newest kernel, because booting
another machine takes as long as several tests.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["machine_of", "superfluous"]

_FIXTURE = "kernel"


def superfluous(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the tests to deselect: those that run the same test as another item, on another kernel."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if (identity := _identity(item)) is not None:
            groups.setdefault(identity, []).append(item)
    left: list[pytest.Item] = []
    for identity, group in groups.items():
        # What is chosen must not depend on what else there is, or a test that is run alone would have another kernel.
        chosen = len(group) - 1 if _options(group[0]) else zlib.crc32(identity.encode()) % len(group)
        left += group[:chosen] + group[chosen + 1 :]
    return left


def _identity(item: pytest.Item) -> str | None:
    """Return the name of a test with its parameters except the kernel; None if it must not be deselected."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return None
    if _FIXTURE not in item.callspec.params or _names_kernels(item):
        return None
    if any(item.iter_markers("each_kernel")) or any(item.iter_markers("requires_feature")):
        return None
    # Not by the numbers of parameters: pytest may count them through all kernels.
    others = f"-{item.callspec.id}-".replace(f"-{item.callspec.params[_FIXTURE]}-", "-", 1).strip("-")
    return f"{item.path.name}::{item.originalname}::{others}"


def machine_of(item: pytest.Item) -> str:
    """Return the kernel and options of a test's machine as text; an empty string for a test without a guest."""
    kernel = (
        item.callspec.params.get(_FIXTURE, "")
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        else ""
    )
    return f"{kernel} {_options(item)}".strip()


def _options(item: pytest.Item) -> str:
    """Return the options in a test's ``machine`` markers as text, or an empty string."""
    options = {name: value for marker in item.iter_markers("machine") for name, value in marker.kwargs.items()}
    return " ".join(f"{name}={options[name]}" for name in sorted(options))


def _names_kernels(item: pytest.Item) -> bool:
    return any(_FIXTURE in str(marker.args[0]).split(",") for marker in item.iter_markers("parametrize"))
