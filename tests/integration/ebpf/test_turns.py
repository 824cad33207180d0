"""What a program does at each turn, run in this process: whether it goes on, and whether it leaves a bit."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.asm.assembler import Assembler
from dprobes.bpf.asm.isa import Register
from dprobes.bpf.layout import CROSSED_SIZE, STATUS_SIZE, MapName, Status, Turn
from dprobes.bpf.lower import Placement, Request
from dprobes.bpf.lower.switchover import write_turn
from dprobes.engines.ebpf.kernel.bpfmaps import ArrayMap, OuterMap
from dprobes.engines.ebpf.kernel.loader import load
from dprobes.engines.linux.bpfcalls import ProgramFlag, ProgramRunner, ProgramType
from integration.ebpf.kernel import require_bpf, require_initial_namespace

if TYPE_CHECKING:
    from collections.abc import Iterator

OLD, NEW, BOTH = Request(replaceable=True), Request(replaces=True), Request(replaceable=True, replaces=True)


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


class Turns:
    """Hold the maps of one program; ``is_ours`` runs what a handler begins with."""

    def __init__(self) -> None:
        self.status = ArrayMap(STATUS_SIZE)
        self.crossed = ArrayMap(CROSSED_SIZE)
        self.others = ArrayMap(CROSSED_SIZE)
        self.successor = OuterMap(self.others.fd)

    def close(self) -> None:
        for each in (self.successor, self.others, self.crossed, self.status):
            each.close()

    def is_ours(self, request: Request, turn: Turn) -> bool:
        asm = Assembler()
        outside = asm.label()
        write_turn(asm, request, outside)
        asm.mov(Register.R0, 1)
        asm.exit()
        if request.replaceable or request.replaces:
            asm.place(outside)
            asm.mov(Register.R0, 0)
            asm.exit()
        maps = {
            MapName.STATUS: self.status.fd,
            MapName.CROSSED: self.crossed.fd,
            MapName.SUCCESSOR: self.successor.fd,
        }
        program = load(asm.assemble(), maps, ProgramType.SYSCALL, flags=ProgramFlag.SLEEPABLE)
        self.status.words[Status.TURN // 8] = turn
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
def turns() -> Iterator[Turns]:
    found = Turns()
    yield found
    found.close()


def test_a_program_that_nothing_replaces_asks_for_no_turn(turns: Turns) -> None:
    assert all(turns.is_ours(Request(), turn) for turn in Turn)


@pytest.mark.parametrize("request_", [OLD, NEW, BOTH], ids=["old", "new", "both"])
def test_all_hits_are_ours_or_none(turns: Turns, request_: Request) -> None:
    assert turns.is_ours(request_, Turn.OURS)
    assert not turns.is_ours(request_, Turn.NOT_OURS)
    assert bits(turns.crossed) == set()


@pytest.mark.parametrize("request_", [NEW, BOTH], ids=["new", "both"])
def test_a_thread_that_crosses_has_a_bit_from_then_on(turns: Turns, request_: Request) -> None:
    tids: set[int] = set()

    def cross() -> None:
        tids.add(threading.get_native_id())
        assert turns.is_ours(request_, Turn.CROSSING)

    for _ in range(2):
        cross()
        assert bits(turns.crossed) == tids
        other = threading.Thread(target=cross)
        other.start()
        other.join()
        assert bits(turns.crossed) == tids


@pytest.mark.parametrize("request_", [OLD, BOTH], ids=["old", "both"])
def test_what_is_replaced_has_the_hits_of_threads_without_a_bit(turns: Turns, request_: Request) -> None:
    # Nobody is there yet who could have crossed.
    assert turns.is_ours(request_, Turn.REPLACED)
    turns.successor.put(turns.others.fd)
    assert turns.is_ours(request_, Turn.REPLACED)
    tid = threading.get_native_id()
    turns.others.memory[:] = b"\xff" * CROSSED_SIZE
    turns.others.words[tid // 64] ^= 1 << tid % 64
    assert turns.is_ours(request_, Turn.REPLACED)
    turns.others.memory[:] = bytes(CROSSED_SIZE)
    turns.others.words[tid // 64] = 1 << tid % 64
    assert not turns.is_ours(request_, Turn.REPLACED)
    assert bits(turns.crossed) == set()


@pytest.mark.parametrize("request_", [OLD, NEW, BOTH], ids=["old", "new", "both"])
def test_an_event_knows_only_whose_turn_it_is(turns: Turns, request_: Request) -> None:
    event = replace(request_, placement=Placement.EVENT)
    assert [turn for turn in Turn if turns.is_ours(event, turn)] == [Turn.OURS, Turn.CROSSING]
    assert bits(turns.crossed) == set()
