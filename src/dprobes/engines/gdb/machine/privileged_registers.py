"""
System registers and segmented addresses of a processor of a stopped machine.

Control registers are in the stub's description; tables, segments and debug registers are in the output of its monitor.
For ``msr`` and ``cpuid`` the processor executes the instruction, which is possible while it is in the kernel.
Elsewhere, only the few model-specific registers that the stub describes are available.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from dprobes.errors import EngineError
from dprobes.vm import SelectorFault

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dprobes.engines.gdb.machine.machine_target import MachineTarget, Paging
    from dprobes.engines.gdb.remote_protocol import ThreadId
    from dprobes.engines.gdb.stub_registers import Registers
    from dprobes.engines.gdb.stub_requests import Stub

__all__ = [
    "CPUID",
    "MONITORED",
    "RDMSR",
    "SELECTED",
    "Executor",
    "Monitor",
    "Privileged",
    "Segment",
    "SystemRegisters",
    "fault_entries",
]

# A gate of 64-bit mode has 16 bytes (AMD64 APM, volume 2, section 4.8.4)::
#
#     0..1 offset 0-15 │ 2..3 selector │ 4 IST │ 5 type, present │ 6..7 offset 16-31 │ 8..11 offset 32-63 │ 12..15


_GATE = struct.Struct("<HHBBHII")
_GATE_PRESENT = 0x80
_EXCEPTIONS = 32
_TRAPS = frozenset({1, 2, 3, 4, 18})
"""Vectors of exceptions that are no faults of an instruction: #DB, NMI, #BP, #OF, #MC."""


def fault_entries(read: Callable[[int, int], bytes], table: int, limit: int) -> frozenset[int]:
    """Return the addresses of the handlers of faults in the IDT at ``table``. ``read`` reads memory."""
    count = min(_EXCEPTIONS, (limit + 1) // _GATE.size)
    data = read(table, count * _GATE.size)
    found = set()
    for number in range(len(data) // _GATE.size):
        low, _, _, kind, middle, high, _ = _GATE.unpack_from(data, number * _GATE.size)
        if number not in _TRAPS and kind & _GATE_PRESENT:
            found.add(low | middle << 16 | high << 32)
    return frozenset(found)


# Instructions whose results no stub provides are executed by the processor. Its registers are set to the instruction's
# inputs, and its instruction pointer to an address in the kernel with the bytes of the instruction. After a single step
# they are restored. If the instruction faults, the step ends at the first instruction of the kernel's fault handler;
# then there is no result. Interrupts are disabled during the step.


RDMSR: Final = b"\x0f\x32"
CPUID: Final = b"\x0f\xa2"
_PIECE, _TEXT_MAX = 1 << 16, 1 << 25
_RESTORED = ("rax", "rbx", "rcx", "rdx", "rsp", "eflags", "rip")
"""Registers that the instructions, or the entry of an exception, change."""


class Executor:
    """Executor of single instructions on processors of a ``target``; the kernel's code begins at ``text``."""

    def __init__(self, target: MachineTarget, text: int, tables: int, paging: Paging) -> None:
        self._target = target
        self._text, self._tables, self._paging = text, tables, paging
        self._places: dict[bytes, int | None] = {}

    def execute(
        self, code: bytes, thread: ThreadId | None, inputs: Mapping[str, int], outputs: tuple[str, ...]
    ) -> tuple[int, ...] | None:
        """Return the registers ``outputs`` after the instruction ``code``; None if it faults or the kernel lacks it."""
        place = self._place_of(code)
        if place is None:
            return None
        registers = self._target.registers(thread)
        before = {name: registers[name] for name in _RESTORED}
        try:
            for name, value in {**inputs, "rip": place}.items():
                registers[name] = value
            self._target.write_back(thread, registers)
            self._target.step(thread, place, "rip", is_exact=False)
            registers = self._target.registers(thread)
            has_executed = registers["rip"] == place + len(code)
            result = tuple(registers[name] for name in outputs)
        finally:
            registers = self._target.registers(thread)
            for name, value in before.items():
                if registers[name] != value:
                    registers[name] = value
            self._target.write_back(thread, registers)
        return result if has_executed else None

    def _place_of(self, code: bytes) -> int | None:
        """Return an address in the kernel's .text with these bytes, even inside other instructions, else None."""
        if code not in self._places:
            self._places[code] = self._search(code)
        return self._places[code]

    def _search(self, code: bytes) -> int | None:
        before = b""
        for start in range(self._text, self._text + _TEXT_MAX, _PIECE):
            piece = self._target.read_large(self._tables, self._paging, start, _PIECE)
            if (at := (before + piece).find(code)) >= 0:
                return start - len(before) + at
            if len(piece) < _PIECE:
                break
            before = piece[1 - len(code) :]
        return None


# QEMU's monitor provides what the protocol has no packets for: system registers, I/O ports, and dumps.
#
# Its commands are about one processor at a time, which ``cpu`` chooses. For x86-64, ``info registers`` prints among
# others::
#
#     LDT=0000 0000000000000000 0000ffff 00008200 DPL=0 LDT
#     TR =0040 fffffe0000003000 00004087 00008b00 DPL=0 TSS64-busy
#     GDT=     fffffe0000001000 0000007f
#     IDT=     fffffe0000000000 00000fff
#     DR0=0000000000000000 DR1=0000000000000000 DR2=0000000000000000 DR3=0000000000000000
#     CS =0010 0000000000000000 ffffffff 00af9b00 DPL=0 CS64 [-RA]
#
# A segment is its selector, base, limit and the upper word of its descriptor.


_SEGMENT = re.compile(r"^([CDEFGS]S|LDT|TR) *=([0-9a-f]{4}) ([0-9a-f]+) ([0-9a-f]{8}) ([0-9a-f]{8})", re.MULTILINE)
_TABLE = re.compile(r"^(GDT|IDT)= +([0-9a-f]+) ([0-9a-f]{8})", re.MULTILINE)
_DEBUG = re.compile(r"\b(DR[0-7])=([0-9a-f]+)")
_PORT = re.compile(r"^port[bwl]\[0x[0-9a-f]+\] = 0x([0-9a-f]+)", re.MULTILINE)
_WARNING = re.compile(r"(?:[\w.+-]+: )?warning: ", re.IGNORECASE)
_DUMP_PATIENCE = 600.0
"""Seconds to wait while the memory of a large machine is written."""
_FORMATS = {1: "b", 2: "h", 4: "w"}


class Segment(NamedTuple):
    """A segment register: selector, base address, limit (the last valid offset), and flags as QEMU prints them."""

    selector: int
    base: int
    limit: int
    flags: int


class SystemRegisters(NamedTuple):
    """System registers of a processor: segments, descriptor tables as base and limit, debug registers."""

    segments: Mapping[str, Segment]
    tables: Mapping[str, tuple[int, int]]
    debug: Mapping[str, int]


class Monitor:
    """QEMU's monitor, through the packet ``qRcmd`` of a ``stub``."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub

    def _ask(self, line: str) -> str:
        answer = self._stub.command(line)
        if answer is None:
            raise EngineError(f"the stub {self._stub.name} has no monitor, which '{line}' is for")
        return answer

    @property
    def is_there(self) -> bool:
        """True if the stub has QEMU's monitor."""
        return "CPU #" in (self._stub.command("info cpus") or "")

    def system_registers(self, processor: int) -> SystemRegisters:
        """Return the registers of a processor, by the monitor's number; raise ``EngineError`` if it prints none."""
        self._ask(f"cpu {processor}")
        said = self._ask("info registers")
        found = SystemRegisters(
            {m[1].lower(): Segment(*(int(number, 16) for number in m.groups()[1:])) for m in _SEGMENT.finditer(said)},
            {m[1].lower(): (int(m[2], 16), int(m[3], 16)) for m in _TABLE.finditer(said)},
            {m[1].lower(): int(m[2], 16) for m in _DEBUG.finditer(said)},
        )
        if not found.tables:
            raise EngineError(f"the monitor behind the stub {self._stub.name} reports no system registers")
        return found

    def read_port(self, port: int, size: int) -> int:
        """Read an I/O port, which may have side effects; raise ``EngineError`` if that fails."""
        said = self._ask(f"i /{_FORMATS[size]} {port:#x}")
        found = _PORT.search(said)
        if found is None:
            raise EngineError(f"the monitor behind the stub {self._stub.name} reads no port {port:#x}: {said.strip()}")
        return int(found[1], 16)

    def write_port(self, port: int, size: int, value: int) -> None:
        """Write to an I/O port; raise ``EngineError`` if that fails."""
        _, problem = _warnings_and_problem(self._ask(f"o /{_FORMATS[size]} {port:#x} {value:#x}"))
        if problem:
            raise EngineError(f"the monitor behind the stub {self._stub.name} writes no port {port:#x}: {problem}")

    def dump(self, path: str) -> str:
        """
        Write the machine's memory and registers to a new file; return the monitor's warnings, normally empty.

        Raise ``EngineError`` if that fails.
        """
        said = self._stub.command(f'dump-guest-memory "{path}"', _DUMP_PATIENCE)
        warnings, problem = _warnings_and_problem(said or "")
        if said is None or problem:
            raise EngineError(f"the stub {self._stub.name} writes no dump: {problem or 'it has no monitor'}")
        return warnings


def _warnings_and_problem(said: str) -> tuple[str, str]:
    """
    Return the warnings and the error in the output of a command that prints nothing when it succeeds.

    A warning of QEMU begins as in ``warn_report`` (util/qemu-error.c); the command is carried out nevertheless.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    warnings = [line for line in lines if _WARNING.match(line)]
    return "; ".join(warnings), "; ".join(line for line in lines if line not in warnings)


MONITORED = ("tr", "ldtr", "dr0", "dr1", "dr2", "dr3", "dr6", "dr7")
"""Registers with one value that the monitor prints."""
SELECTED = ("gdtr", "idtr", "msr", "cpuid")
"""Registers with several values, or with a selector."""

_DESCRIBED = {0xC0000080: "efer", 0xC0000100: "fs_base", 0xC0000101: "gs_base", 0xC0000102: "k_gs_base"}
"""Model-specific registers by number, with their names in the stub's description."""
_LOW = (1 << 32) - 1
_PROTECTED, _LONG_CODE = 1 << 0, 1 << 21
"""cr0.PE, and the flag L in the upper word of a descriptor."""
_PRESENT, _IS_CODE_OR_DATA, _IS_CODE, _WRITABLE, _GRANULAR = 1 << 15, 1 << 12, 1 << 11, 1 << 9, 1 << 23
_LOCAL = 1 << 2
_DESCRIPTOR, _PAGE_BITS, _LEAST_SELECTOR = 8, 12, 4


def _allows(flags: int, *, reads: bool, write: bool) -> bool:
    """Return True if a segment with these flags permits a write, or a read, or, if neither is wanted, is valid."""
    if not flags & _PRESENT or not flags & _IS_CODE_OR_DATA:
        return False
    if write:
        return not flags & _IS_CODE and bool(flags & _WRITABLE)
    return not reads or not flags & _IS_CODE or bool(flags & _WRITABLE)  # in a code segment, this bit means readable


class Privileged:
    """Access to system registers and segments of a ``target``, by thread; ``executor`` is None without a kernel."""

    def __init__(self, target: MachineTarget, monitor: Monitor, executor: Executor | None) -> None:
        self._target, self.monitor, self._executor = target, monitor, executor
        self._told: tuple[int, SystemRegisters] | None = None

    def forget(self) -> None:
        """Discard cached registers because the machine has resumed."""
        self._told = None

    def _system(self, thread: ThreadId | None) -> SystemRegisters:
        processor = 0 if thread is None else thread.thread - 1
        if self._told is None or self._told[0] != processor:
            self._told = processor, self.monitor.system_registers(processor)
        return self._told[1]

    def value(self, name: str, thread: ThreadId | None) -> int:
        """Return the value of a register of ``MONITORED``, such as cr0, on the processor ``thread``."""
        system = self._system(thread)
        if name.startswith("dr"):
            return system.debug.get(name, 0)
        return system.segments["ldt" if name == "ldtr" else name].selector

    def table(self, name: str, thread: ThreadId | None) -> tuple[int, int]:
        """Return base and limit of a descriptor table, ``gdt`` or ``idt``."""
        return self._system(thread).tables[name]

    def selected(self, name: str, selector: int, thread: ThreadId | None, registers: Registers) -> tuple[int, ...]:
        """Return the values of a register of ``SELECTED``, in the order of their pushes, or zeros if unavailable."""
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
        """Return the base of the code segment, to which the program counter is relative. It is 0 in long mode."""
        segment = self._system(thread).segments["cs"]
        return 0 if segment.flags & _LONG_CODE else segment.base

    def linear_address(
        self, selector: int, offset: int, size: int, thread: ThreadId | None, registers: Registers, *, write: bool
    ) -> int:
        """Return the address of ``selector:offset``; raise ``SelectorFault`` if the segment forbids the access."""
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
        is_within = is_long or offset + max(1, size) - 1 <= limit
        if not is_within or not _allows(flags, reads=size > 0, write=write):
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
