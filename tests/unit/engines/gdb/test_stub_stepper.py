"""An instruction under a breakpoint is executed: here, by a step, or between breakpoints wherever it may lead."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from dprobes.arch import architecture
from dprobes.engines.gdb.remote_protocol import Stopped, ThreadId
from dprobes.engines.gdb.stub_registers import processor_of, registers_of
from dprobes.engines.gdb.stub_requests import Stub
from dprobes.engines.gdb.stub_stepper import Stepper
from dprobes.engines.gdb.stub_target import StubTarget
from dprobes.errors import EngineError
from support.fake_stub import FakeStub

if TYPE_CHECKING:
    from collections.abc import Iterator

BASE = 0x10000
PC, LINK = 64, 67
"""Their numbers among the registers of PowerPC that nobody describes."""


class Machine:
    """A PowerPC with one thread; a ``step`` or a run goes on to ``leads_to``."""

    def __init__(self, code: str, leads_to: int, actions: str) -> None:
        self.memory = bytearray.fromhex(code) + bytes(64)
        self.registers = bytearray(32 * 4 + 32 * 8 + 7 * 4)
        self.leads_to = leads_to
        self.sticks = False
        """Whether no step leads away from a breakpoint."""
        self.breakpoints: set[int] = set()
        self.seen: list[set[int]] = []
        self._actions = actions
        self.set_register(PC, BASE)

    def _place(self, number: int) -> int:
        return 4 * number if number < 32 else 32 * 4 + 32 * 8 + 4 * (number - PC)

    def set_register(self, number: int, value: int) -> None:
        at = self._place(number)
        self.registers[at : at + 4] = value.to_bytes(4, "big")

    def answer(self, payload: bytes) -> bytes | None:
        text = payload.decode()
        if text.startswith("vCont;"):
            self.seen.append(set(self.breakpoints))
            if not (self.sticks and self.breakpoints):
                self.set_register(PC, self.leads_to)
            return b"T05thread:1;"
        match text[:1]:
            case "v" if text == "vCont?":
                return self._actions.encode()
            case "g":
                return self.registers.hex().encode()
            case "G":
                self.registers[:] = bytes.fromhex(text[1:])
                return b"OK"
            case "m":
                start, size = (int(number, 16) for number in text[1:].split(","))
                return self.memory[start - BASE :][:size].hex().encode() or b"E14"
            case "Z" | "z":
                change = self.breakpoints.add if text[0] == "Z" else self.breakpoints.discard
                change(int(text.split(",")[1], 16))
                return b"OK"
            case "H":
                return b"OK"
        return b""


@contextmanager
def stepper_of(machine: Machine) -> Iterator[tuple[Stepper, StubTarget]]:
    arch = architecture("ppc")
    processor = processor_of(arch)
    assert processor is not None
    with FakeStub(machine.answer) as fake:
        stub = Stub(fake.transport, 5)
        stub.start()
        target = StubTarget(stub, "big", processor.default_description(), processor.breakpoint)
        yield Stepper(target, processor, arch, registers_of(arch, processor, target.description)), target


THREAD = ThreadId(0, 1)


def step(machine: Machine, raw: bytes | None = None) -> set[int]:
    """Step over the breakpoint at the first instruction, which stays; return where breakpoints are then."""
    with stepper_of(machine) as (stepper, target):
        target.insert(BASE)
        reply = stepper.step_over(BASE, raw, THREAD, target.registers(THREAD), {BASE})
        assert reply == Stopped(5, THREAD, {})
        target.stub.ask("?")
        return set(machine.breakpoints)


def test_a_step_from_a_breakpoint_that_stays() -> None:
    machine = Machine("38630001", BASE + 4, "vCont;c;C;s;S")
    assert step(machine) == {BASE}
    assert machine.seen == [{BASE}]


def test_a_step_from_a_breakpoint_that_is_taken_out() -> None:
    """A stub that stays at a breakpoint is asked that once; an instruction that may lead to itself does not tell."""
    machine = Machine("38630001", BASE + 4, "vCont;c;C;s;S")
    machine.sticks = True
    with stepper_of(machine) as (stepper, target):
        for _ in range(3):
            target.insert(BASE)
            stepper.step_over(BASE, None, THREAD, target.registers(THREAD), {BASE})
            target.stub.ask("?")
            machine.set_register(PC, BASE)
    assert machine.seen == [{BASE}, set(), set(), set()]
    looping = Machine("42000000", BASE, "vCont;c;C;s;S")  # bdnz to itself
    assert step(looping) == {BASE}
    assert looping.seen == [set()]


def test_an_instruction_that_leads_to_the_next_one() -> None:
    machine = Machine("38630001", BASE + 4, "vCont;c;C")
    assert step(machine) == {BASE}
    assert machine.seen == [{BASE + 4}]


def test_both_ways_of_a_branch() -> None:
    machine = Machine("41820020", BASE + 0x20, "vCont;c;C")  # beq +32
    assert step(machine, bytes.fromhex("41820020")) == {BASE}
    assert machine.seen == [{BASE + 4, BASE + 0x20}]


def test_a_return() -> None:
    machine = Machine("4e800020", BASE + 0x100, "vCont;c;C")
    machine.set_register(LINK, BASE + 0x100)
    assert step(machine) == {BASE}
    assert machine.seen == [{BASE + 4, BASE + 0x100}]


def test_what_cannot_be_followed() -> None:
    with pytest.raises(EngineError) as caught:
        step(Machine("4c000024", BASE, "vCont;c;C"))  # rfid
    assert caught.value.message == (
        "the stub fake makes no single steps, and the instruction at 0x10000 cannot be followed: "
        "where the branch 0x4c000024 leads is not known"
    )


def test_a_function_is_left_at_once() -> None:
    machine = Machine("38630001", BASE, "vCont;c;C;s;S")
    machine.set_register(LINK, BASE + 0x200)
    with stepper_of(machine) as (stepper, target):
        registers = target.registers(THREAD)
        assert stepper.return_place(registers) == (BASE + 0x200, 0)
        assert stepper.leave_function(7, THREAD, registers) == Stopped(5, THREAD, {})
        target.stub.ask("?")
        after = target.registers(THREAD)
    assert (after["r3"], after["pc"], after["r1"]) == (7, BASE + 0x200, 0)
