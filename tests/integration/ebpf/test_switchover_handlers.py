"""What a program does in each state of a switch-over, run here: whether it goes on, and whether it leaves a bit."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.bpf_instructions import Register
from dprobes.bpf.lower import Placement, Request
from dprobes.bpf.lower.hits.hit_prologue import write_switch_over
from dprobes.bpf.map_layouts import CROSSED_SIZE, STATUS_SIZE, MapName, Status, SwitchOver
from dprobes.engines.ebpf.kernel.bpf_objects import ArrayMap, OuterMap, load
from dprobes.platform.linux.bpf_calls import ProgramFlag, ProgramRunner, ProgramType
from integration.ebpf.kernel import require_bpf, require_initial_namespace

if TYPE_CHECKING:
    from collections.abc import Iterator

OLD, NEW, BOTH = Request(replaceable=True), Request(replaces=True), Request(replaceable=True, replaces=True)


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


class Maps:
    """Hold the maps of one program; ``is_ours`` runs what a handler begins with."""

    def __init__(self) -> None:
        self.status = ArrayMap(STATUS_SIZE)
        self.crossed = ArrayMap(CROSSED_SIZE)
        self.others = ArrayMap(CROSSED_SIZE)
        self.successor = OuterMap(self.others.fd)

    def close(self) -> None:
        for each in (self.successor, self.others, self.crossed, self.status):
            each.close()

    def is_ours(self, request: Request, state: SwitchOver) -> bool:
        asm = Assembler()
        outside = asm.label()
        write_switch_over(asm, request, outside)
        asm.mov(Register.R0, 1)
        asm.exit()
        if request.replaceable or request.replaces:
            asm.place(outside)
            asm.mov(Register.R0, 0)
            asm.exit()
        descriptors = {
            MapName.STATUS: self.status.fd,
            MapName.CROSSED: self.crossed.fd,
            MapName.SUCCESSOR: self.successor.fd,
        }
        program = load(asm.assemble(), descriptors, ProgramType.SYSCALL, flags=ProgramFlag.SLEEPABLE)
        self.status.words[Status.SWITCH_OVER // 8] = state
        try:
            return bool(ProgramRunner(program, bytearray(8)).run())
        finally:
            os.close(program)


def bits(crossed: ArrayMap) -> set[int]:
    """Return which threads have a bit."""
    return {
        64 * place + bit for place, word in enumerate(crossed.words) if word for bit in range(64) if word >> bit & 1
    }


@pytest.fixture
def maps() -> Iterator[Maps]:
    found = Maps()
    yield found
    found.close()


def test_a_program_that_nothing_replaces_knows_no_switch_over(maps: Maps) -> None:
    assert all(maps.is_ours(Request(), state) for state in SwitchOver)


@pytest.mark.parametrize("request_", [OLD, NEW, BOTH], ids=["old", "new", "both"])
def test_all_hits_are_ours_or_none(maps: Maps, request_: Request) -> None:
    assert maps.is_ours(request_, SwitchOver.OURS)
    assert not maps.is_ours(request_, SwitchOver.NOT_OURS)
    assert bits(maps.crossed) == set()


@pytest.mark.parametrize("request_", [NEW, BOTH], ids=["new", "both"])
def test_a_thread_that_crosses_has_a_bit_from_then_on(maps: Maps, request_: Request) -> None:
    tids: set[int] = set()

    def cross() -> None:
        tids.add(threading.get_native_id())
        assert maps.is_ours(request_, SwitchOver.CROSSING)

    for _ in range(2):
        cross()
        assert bits(maps.crossed) == tids
        other = threading.Thread(target=cross)
        other.start()
        other.join()
        assert bits(maps.crossed) == tids


@pytest.mark.parametrize("request_", [OLD, BOTH], ids=["old", "both"])
def test_what_is_replaced_has_the_hits_of_threads_without_a_bit(maps: Maps, request_: Request) -> None:
    # Nobody is there yet who could have crossed.
    assert maps.is_ours(request_, SwitchOver.REPLACED)
    maps.successor.put(maps.others.fd)
    assert maps.is_ours(request_, SwitchOver.REPLACED)
    tid = threading.get_native_id()
    maps.others.memory[:] = b"\xff" * CROSSED_SIZE
    maps.others.words[tid // 64] ^= 1 << tid % 64
    assert maps.is_ours(request_, SwitchOver.REPLACED)
    maps.others.memory[:] = bytes(CROSSED_SIZE)
    maps.others.words[tid // 64] = 1 << tid % 64
    assert not maps.is_ours(request_, SwitchOver.REPLACED)
    assert bits(maps.crossed) == set()


@pytest.mark.parametrize("request_", [OLD, NEW, BOTH], ids=["old", "new", "both"])
def test_an_event_knows_only_whose_the_hits_are(maps: Maps, request_: Request) -> None:
    event = replace(request_, placement=Placement.EVENT)
    assert [state for state in SwitchOver if maps.is_ours(event, state)] == [SwitchOver.OURS, SwitchOver.CROSSING]
    assert bits(maps.crossed) == set()
