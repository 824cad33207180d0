"""A profile of call stacks: what each stack weighs, and the tree that they make."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["FrameNode", "StackProfile", "StackSample", "tree_of"]


@dataclass(frozen=True, slots=True)
class StackProfile:
    """
    What stacks weigh: ``weights`` by the names of their frames, the outermost first.

    ``unit`` says what a weight counts: samples, bytes, nanoseconds. ``title`` is shown to people.
    """

    weights: Mapping[tuple[str, ...], int]
    unit: str = "samples"
    title: str = ""

    @property
    def total(self) -> int:
        """The weight of all stacks together."""
        return sum(self.weights.values())


@dataclass(slots=True)
class FrameNode:
    """
    A frame in the tree of all stacks: what the stacks weigh that have it there, and those that end with it.

    ``before`` is the same weight in the profile that this one is compared with.
    """

    name: str
    weight: int = 0
    own: int = 0
    before: int = 0
    callees: dict[str, FrameNode] = field(default_factory=dict)

    def callee(self, name: str) -> FrameNode:
        """Return the node of a frame that this one calls."""
        if name not in self.callees:
            self.callees[name] = FrameNode(name)
        return self.callees[name]

    def sorted_callees(self) -> Iterator[FrameNode]:
        """Give the nodes of the frames that this one calls, by name."""
        yield from (node for _, node in sorted(self.callees.items()))


def tree_of(profile: StackProfile, baseline: StackProfile | None = None) -> FrameNode:
    """Return the tree of a profile; with a ``baseline`` its frames are in it as well."""
    root = FrameNode("all")
    for stack, weight in profile.weights.items():
        node = root
        node.weight += weight
        for name in stack:
            node = node.callee(name)
            node.weight += weight
        node.own += weight
    if baseline is not None:
        for stack, weight in baseline.weights.items():
            node = root
            node.before += weight
            for name in stack:
                node = node.callee(name)
                node.before += weight
    return root


class StackSample(NamedTuple):
    """A stack at its time, CLOCK_MONOTONIC in nanoseconds; the outermost function is the first."""

    time: int
    cpu: int | None
    pid: int
    tid: int
    name: str
    stack: tuple[str, ...]
    weight: int
