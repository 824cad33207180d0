"""The parts of a program in the kernel: which sites share a handler, and which handlers share a program and a link."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.bpf.lower.request import Placement
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.bpf.lower.request import Lowered
    from dprobes.engines.ebpf.attach.plannedfile import PlannedCode
    from dprobes.engines.ebpf.attach.siteplan import Site

__all__ = ["ALONE_MAX", "Part", "batches", "joined"]

ALONE_MAX = 16
"""
How many definitions in a file have a program and a link each.

More of them share some: the kernel takes tens of milliseconds to take a link away, one after the other where this
process was killed. A handler in a shared program costs each hit some 20 ns more.
"""


@dataclass(slots=True)
class Part:
    """
    The sites of one definition in one file that are placed alike, or an event.

    ``file`` is None for an event. ``lowered`` is the code until it is loaded: some KiB for each definition. What is
    ``shared`` was lowered for a program with other handlers.
    """

    file: PlannedCode | None
    number: int
    placement: Placement
    sites: list[tuple[int, Site]]
    lowered: Lowered | None
    shared: bool = False

    @property
    def code(self) -> Lowered:
        """The code, while it is there."""
        assert self.lowered is not None, "a part is attached twice"
        return self.lowered


def batches(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Iterate over the parts that get a program together."""
    shared: dict[tuple[int, Placement | None, bool, bool, int], list[Part]] = defaultdict(list)
    for part in parts:
        if not part.shared:
            yield [part]
            continue
        number, layer = _number(part), 0
        # A definition may have several parts with the same probepoint, which the cookie does not tell apart.
        while (alike := shared[_kind(part, layer)]) and _number(alike[-1]) == number:
            layer += 1
        alike.append(part)
    for alike in shared.values():
        yield from _of_limited_size(alike)


def _of_limited_size(parts: Iterable[Part]) -> Iterator[list[Part]]:
    from dprobes.bpf.lower.dispatch import SHARED_MAX

    batch: list[Part] = []
    size = 0
    for part in parts:
        more = len(part.code.assembled.code)
        if batch and size + more > SHARED_MAX:
            yield batch
            batch, size = [], 0
        batch.append(part)
        size += more
    if batch:
        yield batch


def _kind(part: Part, layer: int) -> tuple[int, Placement | None, bool, bool, int]:
    """Return what parts must have in common to share a program and a link."""
    own = part.placement if part.placement.is_in_kernel or part.placement is Placement.URETPROBE else None
    return id(part.file), own, bool(part.sites[0][1].anchor), part.code.sleepable, layer


def _number(part: Part) -> int:
    return part.sites[0][0]


def joined(batch: Sequence[Part], bank_size: int) -> Lowered:
    """Return the code of a batch."""
    first = batch[0].code
    if not batch[0].shared:
        return first
    from dprobes.bpf.lower.dispatch import dispatch

    handlers = [(_number(part), part.code.assembled) for part in batch]
    return replace(first, assembled=dispatch(handlers, bank_size - 1))
