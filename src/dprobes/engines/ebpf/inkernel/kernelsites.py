"""The links to sites in the kernel: where there are addresses, by these; in modules that come and go, by anchors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.ebpf.inkernel.waitingprobes import WaitingProbes
from dprobes.engines.ebpf.kernel.kernellinks import attach_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.engines.ebpf.attach.sitelinks import Group
    from dprobes.engines.ebpf.kernel.descriptors import Descriptors

__all__ = ["KernelLinks"]


class KernelLinks:
    """What attaches the programs of one run in the kernel, or in the module of it that has a name."""

    def __init__(self, module: str) -> None:
        self._waiting = WaitingProbes(module)

    def attach(self, group: Group, places: Sequence[tuple[int, int]]) -> Descriptors:
        """Attach a group's program to places, addresses of its sites with the cookie that the program gets there."""
        # The sites of a group are alike in having anchors or not (``parts``).
        if not group.sites[0][1].anchor:
            return attach_kernel(group.program, places, group.placement)
        anchors = [(site.anchor, cookie) for (_, site), (_, cookie) in zip(group.sites, places, strict=True)]
        return self._waiting.attach(group.program, anchors, at_return=group.placement.is_return)

    def close(self) -> None:
        """Have nothing left, once all that was attached is closed."""
        self._waiting.close()
