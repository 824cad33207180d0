"""What the kernel refuses of a pattern leaves the group, and is reported with the reason."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.lower.lowering_request import Placement, Request, Tables
from dprobes.diagnostics import Diagnostics
from dprobes.engines.ebpf.attach.site_links import Group
from dprobes.engines.ebpf.attach.site_spec import Site
from dprobes.engines.ebpf.inkernel.kernel_groups import KernelGroups
from dprobes.engines.ebpf.kernel import bpf_links
from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features
from dprobes.engines.engine_interface import Notice, StateEvent
from dprobes.errors import EngineError, PrivilegeError
from dprobes.platform.linux import perf_calls
from dprobes.resolve.probepoints import LeftOutProbe, ProbedCode, ProbeKind, Probepoint, ProbeState
from dprobes.rpn.compilation_passes import parse_source
from dprobes.source_text import SourceFile
from dprobes.target.code.machine_code import DecodedInstruction

if TYPE_CHECKING:
    from collections.abc import Sequence


COUNT = 9
REASON = "the kernel excludes it from probes: it is in code that handles probes, or outside code"


def probes_of(offset: str) -> list[Probepoint]:
    source = f"name = vmlinux\nmodtype = kernel\noffset = {offset}\nexit\n"
    (definition,) = parse_source(SourceFile("p", source), Diagnostics()).definitions

    def probe(number: int) -> Probepoint:
        code = ProbedCode(DecodedInstruction(0x100 + number, 0, b"", "?", 0, "?", number))
        return Probepoint(ProbeKind.BREAKPOINT, 0, definition, "vmlinux", f"work_{number}", code)

    return [probe(number) for number in range(COUNT)]


def group(placement: Placement) -> Group:
    sites = [(number, Site(0x100 + number, placement, "", may_fault=False)) for number in range(COUNT)]
    return Group(-1, "", "", placement, sites)


def groups_of(probes: list[Probepoint]) -> KernelGroups:
    request = Request(tables=Tables(1, 1, 64))
    return KernelGroups(probes, None, request, {}, Features(overrides={Feature.LINK_MISSED: False}))


def opened(*_: object, **__: object) -> int:
    return os.open(os.devnull, os.O_RDONLY)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Let the kernel refuse functions with odd addresses from 0x105 on; return what it was asked for."""
    lists: list[list[int]] = []

    def check(addresses: Sequence[int]) -> None:
        lists.append(list(addresses))
        if any(address % 2 and address >= 0x105 for address in addresses):
            raise OSError(errno.EINVAL, "Invalid argument")

    def link(_program: int, addresses: Sequence[int], _cookies: Sequence[int], _flags: int = 0) -> int:
        check(addresses)
        return opened()

    def open_one(_unit: object, address: int, **_: object) -> int:
        check([address])
        return opened()

    monkeypatch.setattr(bpf_links, "link_kprobes", link)
    monkeypatch.setattr(bpf_links, "load", opened)
    monkeypatch.setattr(perf_calls, "open_kprobe", open_one)
    monkeypatch.setattr(bpf_links, "link_perf_event", opened)
    monkeypatch.setattr(perf_calls, "enable", lambda _: None)
    monkeypatch.setattr(perf_calls, "kprobe_unit", lambda: None)
    return lists


@pytest.mark.parametrize("placement", [Placement.ENTRY, Placement.KPROBE])
def test_what_is_refused_of_a_pattern_leaves_the_group(placement: Placement, tried: list[list[int]]) -> None:
    groups = groups_of(probes_of('"work_*"'))
    many = group(placement)
    groups.link(many, [(site.offset, number) for number, site in many.sites]).close()
    assert [number for number, _ in many.sites] == [0, 1, 2, 3, 4, 6, 8]
    if placement is Placement.ENTRY:
        assert tried[-1] == [0x100, 0x101, 0x102, 0x103, 0x104, 0x106, 0x108]
    assert list(groups.left_out) == [
        LeftOutProbe(0, "vmlinux", "work_5", REASON),
        LeftOutProbe(0, "vmlinux", "work_7", REASON),
    ]
    states = list(groups.states_of(range(COUNT)))
    assert states == [StateEvent((5, 7), 0, ProbeState.EXCLUDED, f"work_5, work_7: {REASON}")]


def test_the_only_probepoint_of_a_program_must_be_there(tried: list[list[int]]) -> None:
    groups = groups_of(probes_of("work_5")[:1])
    single = group(Placement.KPROBE)
    with pytest.raises(EngineError) as caught:
        groups.link(single, [(0x105, 5)])
    assert caught.value.message == f"the probepoint at 0x105 in the kernel cannot be attached: {REASON}"
    assert tried == [[0x105]]


def test_one_of_several_probepoints_that_is_refused_keeps_no_other_from_being_there(tried: list[list[int]]) -> None:
    groups = groups_of(probes_of("work_5"))
    single = group(Placement.KPROBE)
    single.sites = single.sites[5:6]
    groups.link(single, [(0x105, 5)]).close()
    assert single.sites == []
    states = list(groups.states_of([5]))
    assert states == [StateEvent((5,), 0, ProbeState.EXCLUDED, f"work_5: {REASON}")]
    assert tried == [[0x105]]


def test_a_kernel_that_does_not_count_misses_is_noted(tried: list[list[int]]) -> None:
    groups = groups_of(probes_of('"work_*"'))
    assert groups.note_of_misses() is None
    many = group(Placement.ENTRY)
    groups.link(many, [(site.offset, number) for number, site in many.sites]).close()
    assert tried
    assert groups.note_of_misses() == Notice(
        "this kernel does not count the hits that come while a handler runs on the same CPU: they are seen nowhere",
        is_warning=False,
    )


def test_another_reason_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(bpf_links, "link_kprobes", refuse)
    many = group(Placement.ENTRY)
    with pytest.raises(PrivilegeError) as caught:
        groups_of(probes_of('"work_*"')).link(many, [(site.offset, number) for number, site in many.sites])
    assert caught.value.message == f"the kernel does not permit the {COUNT} probepoints"
