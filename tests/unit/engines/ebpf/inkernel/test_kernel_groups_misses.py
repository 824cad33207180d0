"""Missed hits are those of one probepoint, or of many that share a link; nothing is forgotten when links are closed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.lower.lowering_request import Placement
from dprobes.engines.ebpf.attach.site_links import Group
from dprobes.engines.ebpf.attach.site_spec import Site
from dprobes.engines.ebpf.inkernel import kernel_groups
from dprobes.engines.ebpf.inkernel.kernel_groups import KernelMisses
from dprobes.engines.ebpf.kernel.bpf_objects import Descriptors
from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features
from dprobes.platform.linux.bpf_calls import ProgramInfo

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = 77


class Types:
    """The kernel's types, as far as they are asked for."""

    def member_offset(self, composite: str, path: str) -> int:
        return {"bpf_link_info.perf_event.kprobe.missed": 48, "bpf_link_info.kprobe_multi.missed": 32}[
            f"{composite}.{path}"
        ]


@pytest.fixture
def missed(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], int]:
    """Return what links have missed, by descriptor and offset; the program has missed 5 hits."""
    counts: dict[tuple[int, int], int] = {}
    monkeypatch.setattr(kernel_groups, "missed_hits", lambda link, offset: counts[link, offset])
    monkeypatch.setattr(kernel_groups, "program_info", lambda _: ProgramInfo(1, 0, 0, 5, 0))
    return counts


@pytest.fixture
def links() -> Iterator[Descriptors]:
    with Descriptors(os.open(os.devnull, os.O_RDONLY) for _ in range(2)) as opened:
        yield opened


def misses(*, is_counted: bool = True) -> KernelMisses:
    features = Features(Types(), {Feature.LINK_MISSED: is_counted})  # type: ignore[arg-type]
    return KernelMisses(features)


def group(placement: Placement, *probes: int) -> Group:
    return Group(PROGRAM, "", "", placement, [(probe, Site(0, placement, "", may_fault=False)) for probe in probes])


def test_each_kprobe_has_a_count(missed: dict[tuple[int, int], int], links: Descriptors) -> None:
    found = misses()
    first, second = links.detach()
    missed |= {(first, 48): 2, (second, 48): 3}
    watched = found.watch(Descriptors([first, second]), group(Placement.KRETPROBE, 4, 6))
    assert found.counts() == {(4,): 2, (6,): 3, (4, 6): 5}
    missed[first, 48] = 9
    watched.close()
    watched.close()
    assert found.counts() == {(4,): 9, (6,): 3, (4, 6): 5}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first)


def test_functions_with_one_link_share_a_count(missed: dict[tuple[int, int], int], links: Descriptors) -> None:
    found = misses()
    first, _ = links.detach()
    missed |= {(first, 32): 2}
    found.watch(Descriptors([first]), group(Placement.ENTRY_RETURN, 4, 6))
    assert found.counts() == {(4, 6): 7}
    found.close()
    missed.clear()
    assert found.counts() == {(4, 6): 7}


def test_a_program_counts_where_links_do_not(missed: dict[tuple[int, int], int], links: Descriptors) -> None:
    assert not missed
    found = misses(is_counted=False)
    assert found.watch(links, group(Placement.KPROBE, 4)) is links
    assert found.counts() == {(4,): 5}
