"""CPUs that come online during a run: samplers and watchpoints, which are events of each CPU, begin there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.interface import Notice
from dprobes.engines.linux.cpus import CpuNews
from dprobes.errors import reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.ebpf.attach.sitelinks import Attachments

__all__ = ["CpuArrivals"]


class CpuArrivals:
    """
    The CPUs that come online from now on.

    The kernel takes events from a CPU that goes offline, so one that comes back counts as well.
    """

    def __init__(self) -> None:
        self._news: CpuNews | None = None
        self._deafness: Notice | None = None
        try:
            self._news = CpuNews()
        except OSError as error:
            message = f"CPUs that come online from now on are not sampled or watched: {reason_of(error)}"
            self._deafness = Notice(message, "the kernel's uevents (netlink) say that they come", is_warning=False)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What can be read when there may be something to do."""
        return () if self._news is None else (self._news.descriptor,)

    def look(self, attachments: Attachments) -> Iterator[Notice]:
        """Attach on CPUs that have come online, and say so."""
        if self._deafness is not None:
            yield self._deafness
            self._deafness = None
        for cpu in () if self._news is None else self._news.arrived():
            refusal: OSError | None = None
            for link in attachments.links():
                try:
                    link.renew(cpu)
                except OSError as error:
                    refusal = error
            if refusal is None:
                yield Notice(f"CPU {cpu} came online: it is sampled and watched from now on", is_warning=False)
            else:
                yield Notice(f"CPU {cpu} came online, and not all is sampled and watched there: {reason_of(refusal)}")

    def close(self) -> None:
        """Follow no more."""
        if self._news is not None:
            self._news.close()
            self._news = None
