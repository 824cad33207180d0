"""Steps in which threads went to sleep: they go on after a stop, and a system call comes back to the original."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from dprobes.engines.hits.hit_lifecycle import HitState
from dprobes.engines.ptrace.breakpoint_sites import Placement
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.interrupted_calls import has_entered, step_on
from dprobes.engines.ptrace.tracer.placed_breakpoints import Breakpoint, Slot
from dprobes.engines.ptrace.tracer.single_steps import Stepper
from dprobes.engines.ptrace.tracer.tracer_state import Thread, ThreadState
from dprobes.platform.linux import ptrace_calls
from dprobes.platform.linux.ptrace_calls import Register
from dprobes.platform.x86.instruction_emulation import Action

if TYPE_CHECKING:
    import ctypes

    from dprobes.engines.ptrace.breakpoint_sites import Site

SITE, SLOT, TID = 0x5000, 0x9000, 7
CALL = b"\x0f\x05"
ENTERING, PID = -errno.ENOSYS & (1 << 64) - 1, 4711


class Machine:
    """A thread with a hit at an instruction of two bytes, which has a slot; ``asked`` is how it was let run."""

    def __init__(self) -> None:
        self.registers = {Register.RIP: SLOT}
        self.asked: list[str] = []
        self.thread = Thread(TID, TID, AddressSpace.closed(8), ThreadState.STOPPED)

    def begin(self, action: Action, state: HitState = HitState.UNFINISHED, *, has_slot: bool = True) -> Thread:
        site = SimpleNamespace(emulation=(action, 2), original=CALL, copy=CALL)
        hit = self.thread.hit
        hit.state, hit.breakpoint = state, Breakpoint(SITE, CALL[0], cast("Site", site))
        if has_slot:
            self.thread.space.slots.by_site[SITE, CALL] = Slot(SLOT, SITE, SLOT + 2, Placement.PAGE)
        return self.thread

    def get(self, _: int, registers: ctypes.Array[ctypes.c_ulong]) -> None:
        for register, value in self.registers.items():
            registers[register] = value

    def set(self, _: int, registers: ctypes.Array[ctypes.c_ulong]) -> None:
        self.registers = {register: registers[register] for register in (Register.RIP, Register.RCX)}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(ptrace_calls, "get_registers", made.get)
    monkeypatch.setattr(ptrace_calls, "set_registers", made.set)
    for name in ("single_step", "resume_to_syscall"):
        monkeypatch.setattr(ptrace_calls, name, lambda _, name=name: made.asked.append(name))
    return made


@pytest.mark.parametrize("state", [HitState.UNFINISHED, HitState.COUNTED])
@pytest.mark.parametrize(("action", "asked"), [(Action.STEP, "single_step"), (Action.SYSTEM_CALL, "resume_to_syscall")])
def test_a_step_goes_on_after_a_stop(machine: Machine, action: Action, asked: str, state: HitState) -> None:
    assert step_on(machine.begin(action, state), ptrace_calls.Registers())
    assert machine.asked == [asked]


@pytest.mark.parametrize(
    ("action", "state", "pc", "trapped", "has_slot"),
    [
        pytest.param(Action.REPEAT, HitState.UNFINISHED, SLOT, 0, True, id="a breakpoint is behind it"),
        pytest.param(Action.STEP, HitState.PENDING, SLOT, 0, True, id="it is not a step"),
        pytest.param(Action.STEP, HitState.UNFINISHED, SITE, 0, True, id="it will hit again"),
        pytest.param(Action.STEP, HitState.UNFINISHED, SLOT + 2, 0, True, id="it is done"),
        pytest.param(Action.STEP, HitState.UNFINISHED, SLOT, SITE, True, id="it has hit again"),
        pytest.param(Action.STEP, HitState.UNFINISHED, SITE, 0, False, id="it is stepped in place"),
    ],
)
def test_other_threads_just_run_on(
    machine: Machine, action: Action, state: HitState, pc: int, trapped: int, has_slot: bool
) -> None:
    machine.registers[Register.RIP] = pc
    machine.thread.trapped = trapped
    assert not step_on(machine.begin(action, state, has_slot=has_slot), ptrace_calls.Registers())
    assert machine.asked == []


@pytest.mark.parametrize(
    ("result", "pc", "has_slot", "entered"),
    [
        (ENTERING, SLOT + 2, True, True),
        (ENTERING, SITE + 2, False, True),
        (PID, SLOT + 2, True, False),
        (ENTERING, 0x7000, True, False),
    ],
)
def test_the_end_of_such_a_step_is_the_entry_into_the_kernel(
    machine: Machine, result: int, pc: int, has_slot: bool, entered: bool
) -> None:
    machine.registers = {Register.RIP: pc, Register.RAX: result}
    assert has_entered(machine.begin(Action.SYSTEM_CALL, has_slot=has_slot), ptrace_calls.Registers()) is entered


@pytest.mark.parametrize(("action", "state"), [(Action.STEP, HitState.UNFINISHED), (Action.SYSTEM_CALL, HitState.NONE)])
def test_another_entry_is_not(machine: Machine, action: Action, state: HitState) -> None:
    machine.registers = {Register.RIP: SLOT + 2, Register.RAX: ENTERING}
    assert not has_entered(machine.begin(action, state), ptrace_calls.Registers())


def test_the_system_call_comes_back_behind_the_original_and_says_so(machine: Machine) -> None:
    machine.registers = {Register.RIP: SLOT + 2, Register.RCX: SLOT + 2, Register.RAX: ENTERING}
    thread, nobody = machine.begin(Action.SYSTEM_CALL), cast("Any", None)
    Stepper(nobody, nobody, nobody, nobody, nobody).settle_late(thread, thread.hit.breakpoint, ptrace_calls.Registers())
    assert machine.registers == {Register.RIP: SITE + 2, Register.RCX: SITE + 2}
