"""CPUs that come online during a run: their events are attached anew, and what the kernel refuses is said."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, cast

from dprobes.engines.ebpf.attach.site_links import CpuArrivals
from dprobes.engines.ebpf.kernel.bpf_links import CpuLinks
from dprobes.engines.ebpf.kernel.bpf_objects import Descriptors
from dprobes.engines.engine_interface import Notice

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from dprobes.engines.ebpf.attach.site_links import Attachments


class Links(CpuLinks):
    """Stand for the links of a sampler: the kernel refuses some CPUs."""

    def __init__(self, refused: tuple[int, ...] = ()) -> None:
        Descriptors.__init__(self)
        self.refused = refused
        self.renewed: list[int] = []

    def renew(self, cpu: int) -> None:
        if cpu in self.refused:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.renewed.append(cpu)


class Attached:
    """Stand for what is attached."""

    def __init__(self, *links: Descriptors) -> None:
        self._links = links

    def links(self) -> Iterator[Descriptors]:
        yield from self._links


class News:
    """Stand for the kernel: CPU 3 has come."""

    descriptor = 77

    def arrived(self) -> list[int]:
        return [3]

    def close(self) -> None:
        pass


def look(monkeypatch: pytest.MonkeyPatch, *links: Descriptors) -> list[Notice]:
    monkeypatch.setattr("dprobes.engines.ebpf.attach.site_links.CpuNews", News)
    return list(CpuArrivals().look(cast("Attachments", Attached(*links))))


def test_what_belongs_to_a_cpu_is_attached_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links()
    (notice,) = look(monkeypatch, links, Descriptors())
    assert links.renewed == [3]
    assert notice == Notice("CPU 3 came online: it is sampled and watched from now on", is_warning=False)


def test_what_the_kernel_refuses_is_said_and_the_rest_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links()
    (notice,) = look(monkeypatch, Links(refused=(3,)), links)
    assert links.renewed == [3]
    said = "CPU 3 came online, and not all is sampled and watched there: no space left on device"
    assert notice == Notice(said)


def test_a_process_that_may_not_listen_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("dprobes.engines.ebpf.attach.site_links.CpuNews", refuse)
    arrivals = CpuArrivals()
    attached = cast("Attachments", Attached(Links()))
    message = "CPUs that come online from now on are not sampled or watched: operation not permitted"
    assert [notice.message for notice in arrivals.look(attached)] == [message]
    assert list(arrivals.look(attached)) == []
