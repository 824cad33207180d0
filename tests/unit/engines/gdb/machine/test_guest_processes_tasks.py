"""Who runs on a processor, by structures of a kernel that are written down here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from dprobes.engines.gdb.machine.guest_processes import NOBODY, Task, TaskReader
from dprobes.engines.gdb.remote_protocol import ThreadId

if TYPE_CHECKING:
    from dprobes.engines.gdb.machine.guest_processes import KernelFacts
    from dprobes.engines.gdb.machine.machine_target import MachineTarget
    from dprobes.engines.gdb.stub_registers import Registers

LAYOUT = SimpleNamespace(tgid=4, pid=8, comm=16, cred=32, mm=40, parent=48, stack=56, uid=4)
OFFSETS, CURRENT = 0x1000, 0x20
FIRST, SECOND = 0xFFFF888000010000, 0xFFFF888000020000
TASK, PARENT, INIT = 0x5000, 0x6000, 0x7000
CREDENTIALS, STACK, SPACE = 0x8000, 0x9000, 0xA000


class Memory:
    def __init__(self) -> None:
        self.data: dict[int, int] = {}

    def put(self, address: int, value: int | bytes, size: int = 8) -> None:
        data = value if isinstance(value, bytes) else value.to_bytes(size, "little")
        self.data |= {address + place: byte for place, byte in enumerate(data)}

    def read(self, address: int, size: int) -> bytes:
        return bytes(self.data.get(address + place, 0) for place in range(size))

    def word(self, address: int, size: int) -> int | None:
        return int.from_bytes(self.read(address, size), "little") if address in self.data else None


def task(memory: Memory, at: int, tgid: int, pid: int, parent: int) -> None:
    memory.put(at + LAYOUT.tgid, tgid, 4)
    memory.put(at + LAYOUT.pid, pid, 4)
    memory.put(at + LAYOUT.parent, parent)


def reader() -> TaskReader:
    memory = Memory()
    memory.put(OFFSETS, FIRST)
    memory.put(OFFSETS + 8, SECOND)
    memory.put(SECOND + CURRENT, TASK)
    task(memory, TASK, 12, 13, PARENT)
    memory.put(TASK + LAYOUT.comm, b"worker\0rest of a name")
    memory.put(TASK + LAYOUT.cred, CREDENTIALS)
    memory.put(TASK + LAYOUT.mm, SPACE)
    memory.put(TASK + LAYOUT.stack, STACK)
    memory.put(CREDENTIALS + LAYOUT.uid, 1000, 4)
    task(memory, PARENT, 7, 7, INIT)
    task(memory, INIT, 1, 1, INIT)
    facts = SimpleNamespace(layout=LAYOUT, cpu_offsets=OFFSETS, current=CURRENT)
    return TaskReader(cast("MachineTarget", memory), cast("KernelFacts", facts), 2)


def test_the_task_of_a_processor() -> None:
    saved = STACK + (1 << 14) - 168
    assert reader().current(1) == Task(TASK, 12, 13, 1000, b"worker", saved, SPACE)


def test_a_processor_without_a_task_has_nobody() -> None:
    assert reader().current(0) == NOBODY


def test_a_task_of_the_kernel_has_no_program() -> None:
    found = reader().task_at(PARENT)
    assert (found.pid, found.saved, found.space, found.uid) == (7, 0, 0, 0)


def test_a_processor_is_known_by_the_data_that_its_segments_lead_to() -> None:
    def registers(gs_base: int, k_gs_base: int) -> Registers:
        values = {"gs_base": gs_base, "k_gs_base": k_gs_base}
        return cast("Registers", SimpleNamespace(value=values.get))

    assert reader().cpu_of(ThreadId(1, 1), registers(SECOND, 0)) == 1
    assert reader().cpu_of(ThreadId(1, 2), registers(0x7F00, FIRST)) == 0
    assert reader().cpu_of(ThreadId(1, 2), registers(0, 0)) == 1
    assert reader().cpu_of(None, registers(0, 0)) == 0


def test_ancestors_end_with_the_first_process() -> None:
    assert list(reader().ancestors(TASK)) == [12, 7, 1]
