"""
On which of its kernels a test runs, where one is enough: half of the tests on each, the same ones on every machine.

A test runs on all of them if kernels differ in what it is about: the marker ``each_kernel`` says so, and so does
``requires_feature``. A test that names its kernels runs on these. Tests with the marker ``machine`` run on
the newest kernel: each machine takes as long to boot as some tests take.
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
    """Return those of the items that do the same as another one, on another kernel."""
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
    """Return what names a test and its parameters but for the kernel; None if it has to run as it is."""
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
    """Return the same text for tests that run on the same machine, and nothing for one without a guest."""
    kernel = (
        item.callspec.params.get(_FIXTURE, "")
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        else ""
    )
    return f"{kernel} {_options(item)}".strip()


def _options(item: pytest.Item) -> str:
    """Return what a test asks of its machine, if anything."""
    options = {name: value for marker in item.iter_markers("machine") for name, value in marker.kwargs.items()}
    return " ".join(f"{name}={options[name]}" for name in sorted(options))


def _names_kernels(item: pytest.Item) -> bool:
    return any(_FIXTURE in str(marker.args[0]).split(",") for marker in item.iter_markers("parametrize"))
