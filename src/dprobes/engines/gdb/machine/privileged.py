"""
The registers that only the system sees, and segmented addresses: of a processor of a machine that stands still.

Control registers are in the stub's description, tables, segments and debug registers in what its monitor says. For
``msr`` and ``cpuid`` the processor executes the instruction, which is possible while it is in the kernel: elsewhere a
few model-specific registers are those that the stub describes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.gdb.machine.execution import CPUID, RDMSR
from dprobes.vm import SelectorFault

if TYPE_CHECKING:
    from dprobes.engines.gdb.machine.execution import Executor
    from dprobes.engines.gdb.machine.machinetarget import MachineTarget
    from dprobes.engines.gdb.machine.monitor import Monitor, SystemRegisters
    from dprobes.engines.gdb.registers import Registers
    from dprobes.engines.gdb.stopreplies import ThreadId

__all__ = ["MONITORED", "SELECTED", "Privileged"]

MONITORED = ("tr", "ldtr", "dr0", "dr1", "dr2", "dr3", "dr6", "dr7")
"""The registers of one value that the monitor tells."""
SELECTED = ("gdtr", "idtr", "msr", "cpuid")
"""Those of several values, or with a selector."""

_DESCRIBED = {0xC0000080: "efer", 0xC0000100: "fs_base", 0xC0000101: "gs_base", 0xC0000102: "k_gs_base"}
"""Model-specific registers by their names in the stub's description."""
_LOW = (1 << 32) - 1
_PROTECTED, _LONG_CODE = 1 << 0, 1 << 21
"""cr0.PE, and the flag L in the upper word of a descriptor."""
_PRESENT, _IS_CODE_OR_DATA, _IS_CODE, _WRITABLE, _GRANULAR = 1 << 15, 1 << 12, 1 << 11, 1 << 9, 1 << 23
_LOCAL = 1 << 2
_DESCRIPTOR, _PAGE_BITS, _LEAST_SELECTOR = 8, 12, 4


class Privileged:
    """What a processor of a ``target`` is asked for, by thread and registers; ``executor`` is None without a kernel."""

    def __init__(self, target: MachineTarget, monitor: Monitor, executor: Executor | None) -> None:
        self._target, self.monitor, self._executor = target, monitor, executor
        self._told: tuple[int, SystemRegisters] | None = None

    def forget(self) -> None:
        """Take notice that the machine has gone on."""
        self._told = None

    def _system(self, thread: ThreadId | None) -> SystemRegisters:
        processor = 0 if thread is None else thread.thread - 1
        if self._told is None or self._told[0] != processor:
            self._told = processor, self.monitor.system_registers(processor)
        return self._told[1]

    def value(self, name: str, thread: ThreadId | None) -> int:
        """Return a register of ``MONITORED``."""
        system = self._system(thread)
        if name.startswith("dr"):
            return system.debug.get(name, 0)
        return system.segments["ldt" if name == "ldtr" else name].selector

    def table(self, name: str, thread: ThreadId | None) -> tuple[int, int]:
        """Return base and limit of a descriptor table, ``gdt`` or ``idt``."""
        return self._system(thread).tables[name]

    def selected(self, name: str, selector: int, thread: ThreadId | None, registers: Registers) -> tuple[int, ...]:
        """Return the values of a register of ``SELECTED``, in the order of their pushes; zeros where there is none."""
        in_kernel = not registers.value("cs") & 3
        match name:
            case "gdtr" | "idtr":
                return self.table(name.removesuffix("r"), thread)
            case "cpuid":
                inputs = {"rax": selector & _LOW, "rcx": 0}
                found = self._execute(CPUID, thread, inputs, ("rdx", "rcx", "rbx", "rax")) if in_kernel else None
                return (0, 0, 0, 0) if found is None else tuple(value & _LOW for value in found)
        number = selector & _LOW
        if number in _DESCRIBED and _DESCRIBED[number] in registers:
            return (registers[_DESCRIBED[number]],)
        found = self._execute(RDMSR, thread, {"rcx": number}, ("rdx", "rax")) if in_kernel else None
        return (0,) if found is None else ((found[0] & _LOW) << 32 | found[1] & _LOW,)

    def _execute(
        self, code: bytes, thread: ThreadId | None, inputs: dict[str, int], outputs: tuple[str, ...]
    ) -> tuple[int, ...] | None:
        return None if self._executor is None else self._executor.execute(code, thread, inputs, outputs)

    def code_base(self, thread: ThreadId | None) -> int:
        """Return by how much linear addresses of code are above the program counter."""
        segment = self._system(thread).segments["cs"]
        return 0 if segment.flags & _LONG_CODE else segment.base

    def linear_address(
        self, selector: int, offset: int, size: int, thread: ThreadId | None, registers: Registers, *, write: bool
    ) -> int:
        """Return the address of ``selector:offset``; raise ``SelectorFault`` if the segment does not allow that."""
        number = selector & 0xFFFF
        if not registers.value("cr0") & _PROTECTED:
            return (number << 4) + (offset & 0xFFFF)
        for name in ("fs", "gs"):
            if number and registers.value(name) == number:
                return registers.value(f"{name}_base") + offset & (1 << 64) - 1
        if number < _LEAST_SELECTOR:
            raise SelectorFault(number)
        system = self._system(thread)
        base, limit, flags = self._descriptor(number, system)
        is_long = bool(system.segments["cs"].flags & _LONG_CODE)
        allowed = flags & _PRESENT and flags & _IS_CODE_OR_DATA
        if write:
            allowed = allowed and not flags & _IS_CODE and flags & _WRITABLE
        elif size:
            allowed = allowed and (not flags & _IS_CODE or flags & _WRITABLE)  # of code the bit says readable
        if not allowed or (not is_long and offset + max(1, size) - 1 > limit):
            raise SelectorFault(number)
        return (0 if is_long else base) + offset & (1 << 64) - 1

    def _descriptor(self, number: int, system: SystemRegisters) -> tuple[int, int, int]:
        """Return base, limit and the upper word of a descriptor (AMD64 APM, volume 2, 4.7)."""
        if number & _LOCAL:
            table = system.segments["ldt"]
            start, end = table.base, table.limit
        else:
            start, end = system.tables["gdt"]
        place = number & -_DESCRIPTOR
        data = self._target.read(start + place, _DESCRIPTOR)
        if place + _DESCRIPTOR - 1 > end or len(data) < _DESCRIPTOR:
            raise SelectorFault(number)
        low, high = int.from_bytes(data[:4], "little"), int.from_bytes(data[4:], "little")
        base = low >> 16 | (high & 0xFF) << 16 | high & 0xFF000000
        limit = low & 0xFFFF | high & 0xF0000
        return base, (limit << _PAGE_BITS | (1 << _PAGE_BITS) - 1) if high & _GRANULAR else limit, high
