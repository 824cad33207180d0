"""A context for handlers without a process, backed by dictionaries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dprobes.arch import RegisterClass
from dprobes.arch import architecture as architecture_called
from dprobes.arch.usdt_arguments import parse_arguments
from dprobes.errors import DprobesError
from dprobes.extensions.extension import call_extensions
from dprobes.record.log_record import FIXED_ITEMS, Item, LogRecord
from dprobes.rpn.instruction_set import PROCESS_NAME_SIZE, UNSEEN_ENTRY
from dprobes.rpn.performance_counters import COUNTERS
from dprobes.vm import AddressFault, SelectorFault

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableSequence, Sequence

    from dprobes.extensions import Extension
    from dprobes.keyed.table_entries import KeyedStore
    from dprobes.vm.rpn_machine import Machine

__all__ = ["PAGE", "FakeContext", "header_of"]

PAGE = 4096
"""Size of a page in bytes: memory is present, or writable, by whole pages, as on a real machine."""

_NULL_SELECTORS = 3
"""Largest null selector: selectors 0 to 3 select no segment, whatever their privilege bits."""


class FakeContext:
    """
    The hit thread of a handler, and all state that the handler can access.

    The arguments define the existing state. A register or value that is not given is 0; other memory and ports do not
    exist. All are attributes, which may be changed between hits, and inspected after them:

    ``registers``, ``user_registers``
        values by name; the user context has the value in ``registers`` if ``user_registers`` has none.
    ``memory``, ``read_only``
        bytes by address. Their pages become present; the rest of a page is zeros. A write to a page of ``read_only``
        faults. ``read`` returns the current contents.
    ``local_variables``, ``global_variables``, ``variables_of_cpu``, ``variables_of_thread``
        the values; ``run_handler`` adds zeros up to the number that a probe program declares.
    ``pid``, ``tid``, ``uid``, ``cpu``, ``task``, ``time``
        the values that the instructions of these names push; stored in ``ids``. ``time`` is in nanoseconds.
    ``comm``
        the name of the process; instructions see its first 15 bytes, as the kernel would store it.
    ``keyed_tables``
        the keyed tables, which ``run_handler`` creates as a probe program declares them.
    ``segments``, ``ports``, ``symbols``, ``traced_fields``
        base address by selector, or (base, last offset); value by port; run-time address by name; value of a field of
        the tracepoint by name. A segment register accepts the selectors listed here, and null selectors.
    ``physical_memory``, ``page_frames``
        bytes by physical address, as in ``memory``; a page's physical address by its virtual address.
        ``read_physical`` returns the current contents.
    ``entry``
        the state at the entry of a call for a handler of its return: registers and counters by name, and ``time``; None
        if the entry was not seen.
    ``counters``
        the thread's performance counters by name; others cannot be read.
    ``cpuid``, ``msr``, ``tables``
        (eax, ebx, ecx, edx) by leaf, value by number, (base, limit) of "gdtr" and "idtr".
    ``usdt_arguments``
        the ELF note's string for each argument of the USDT probe, such as "-4@%eax" or "8@$5"; stored in ``arguments``.
    ``kernel_stack``
        the addresses of the call stack in the kernel, the innermost first; stored in ``frames_in_kernel``.
    ``user_stack``
        the addresses of the call stack in the probed program; stored in ``frames_in_program``.
    ``extensions``
        ``dprobes.extensions.Extension`` by name, in order of registration.

    ``port_writes`` lists (port, size in bytes, value), ``extension_calls`` the operands of ``callk`` (None: all
    extensions), ``warnings`` the messages of extensions that failed.
    """

    def __init__(
        self,
        architecture: str = "x86_64",
        *,
        registers: Mapping[str, int] | None = None,
        user_registers: Mapping[str, int] | None = None,
        memory: Mapping[int, bytes] | None = None,
        read_only: Mapping[int, bytes] | None = None,
        local_variables: Sequence[int] = (),
        global_variables: Sequence[int] = (),
        cpu_variables: Sequence[int] = (),
        thread_variables: Sequence[int] = (),
        pid: int = 0,
        tid: int = 0,
        uid: int = 0,
        cpu: int = 0,
        task: int = 0,
        time: int = 0,
        comm: str = "",
        segments: Mapping[int, int | tuple[int, int]] | None = None,
        ports: Mapping[int, int] | None = None,
        physical_memory: Mapping[int, bytes] | None = None,
        page_frames: Mapping[int, int] | None = None,
        symbols: Mapping[str, int] | None = None,
        traced_fields: Mapping[str, int] | None = None,
        usdt_arguments: Sequence[str] = (),
        entry: Mapping[str, int] | None = None,
        kernel_stack: Sequence[int] = (),
        user_stack: Sequence[int] = (),
        cpuid: Mapping[int, tuple[int, int, int, int]] | None = None,
        msr: Mapping[int, int] | None = None,
        tables: Mapping[str, tuple[int, int]] | None = None,
        counters: Mapping[str, int] | None = None,
        extensions: Mapping[str, Extension] | None = None,
    ) -> None:
        self.architecture = architecture_called(architecture)
        self._registers = {False: self._by_index(registers or {}), True: self._by_index(user_registers or {})}
        self._pages: dict[int, bytearray] = {}
        self._read_only: set[int] = set()
        for contents, is_read_only in ((memory or {}, False), (read_only or {}, True)):
            for address, data in contents.items():
                self.map_memory(address, data, read_only=is_read_only)
        self.local_variables: MutableSequence[int] = list(local_variables)
        self.global_variables: MutableSequence[int] = list(global_variables)
        self.variables_of_cpu = list(cpu_variables)
        self.variables_of_thread = list(thread_variables)
        self.keyed_tables: Sequence[KeyedStore] = []
        self.ids = {"pid": pid, "tid": tid, "uid": uid, "cpu": cpu, "task": task, "time": time}
        self.comm = comm
        self.segments = dict(segments or {})
        self.ports = dict(ports or {})
        self._physical: dict[int, bytearray] = {}
        for address, data in (physical_memory or {}).items():
            self.map_physical_memory(address, data)
        self.page_frames = dict(page_frames or {})
        self.symbols = dict(symbols or {})
        self.traced_fields = dict(traced_fields or {})
        self.arguments = parse_arguments(" ".join(usdt_arguments), self.architecture)
        self.entry = None if entry is None else dict(entry)
        self._by_index(self._registers_at_entry())
        self.frames_in_kernel = list(kernel_stack)
        self.frames_in_program = list(user_stack)
        self.cpuid = dict(cpuid or {})
        self.msr = dict(msr or {})
        self.tables = dict(tables or {})
        self.counters = dict(counters or {})
        self.extensions = dict(extensions or {})
        self.port_writes: list[tuple[int, int, int]] = []
        self.extension_calls: list[str | None] = []
        self.warnings: list[str] = []

    def _by_index(self, registers: Mapping[str, int]) -> dict[int, int]:
        return {self._index(name): value for name, value in registers.items()}

    def _index(self, name: str) -> int:
        register = self.architecture.register(name.lower())
        if register is None:
            raise DprobesError(f"{self.architecture.name} has no register '{name}'")
        return register.index

    # Set-up and inspection by tests

    def map_memory(self, address: int, data: bytes, *, read_only: bool = False) -> None:
        """
        Make the pages of ``data`` present, and store ``data``.

        With ``read_only``, handlers cannot write the pages.
        """
        for page in _pages_of(address, data):
            self._pages.setdefault(page, bytearray(PAGE))
            if read_only:
                self._read_only.add(page)
        _store(self._pages, address, data)

    def map_physical_memory(self, address: int, data: bytes) -> None:
        """Make the pages of ``data`` present in physical memory, and store ``data``."""
        for page in _pages_of(address, data):
            self._physical.setdefault(page, bytearray(PAGE))
        _store(self._physical, address, data)

    def value_of(self, register: str, *, user: bool = False) -> int:
        """
        Return the value of a register by name; raise ``DprobesError`` if the architecture lacks the register.

        With ``user``, it is the register of user mode at the entry to the kernel instead of that at the hit.
        """
        return self.register(self._index(register), user=user)

    def set_value(self, register: str, value: int, *, user: bool = False) -> None:
        """
        Set a register by name; raise ``DprobesError`` if the architecture lacks the register.

        With ``user``, it is the register of user mode at the entry to the kernel instead of that at the hit.
        """
        self._registers[user][self._index(register)] = value

    # The interface for handlers: the protocol ``dprobes.vm.Context``

    def cpu_variables(self) -> list[int]:
        """Return the per-CPU variables, of which there is one set, whatever ``cpu`` is."""
        return self.variables_of_cpu

    def thread_variables(self) -> list[int]:
        """Return the per-thread variables, of which there is one set, whatever ``tid`` is."""
        return self.variables_of_thread

    def register(self, index: int, *, user: bool) -> int:
        """
        Return the register with an index, 0 if it was not set; with ``user``, that of user mode.

        Without a value for user mode, both are the same.
        """
        current = self._registers[False].get(index, 0)
        return self._registers[True].get(index, current) if user else current

    def selected_register(self, index: int, selector: int) -> tuple[int, ...]:
        """
        Return the parts of ``cpuid``, ``msr``, ``gdtr`` or ``idtr`` in the order of their pushes; zeros if not set.

        ``selector`` is the leaf of ``cpuid`` or the number of the ``msr``.
        """
        register = self.architecture.register(index)
        name = register.name if register is not None else ""
        if name == "cpuid":
            return tuple(reversed(self.cpuid.get(selector, (0, 0, 0, 0))))
        if name == "msr":
            return (self.msr.get(selector, 0),)
        return self.tables.get(name, (0, 0))

    def set_register(self, index: int, value: int, *, user: bool) -> None:
        """
        Set the register with an index, with ``user`` that of user mode.

        Raise ``SelectorFault`` for a selector that is neither in ``segments`` nor null.
        """
        register = self.architecture.register(index)
        is_segment = register is not None and register.kind is RegisterClass.SEGMENT
        if is_segment and value & 0xFFFF > _NULL_SELECTORS and value & 0xFFFF not in self.segments:
            raise SelectorFault(value & 0xFFFF)
        self._registers[user][index] = value

    def read(self, address: int, size: int) -> bytes:
        """Return ``size`` bytes of memory; raise ``AddressFault`` if a page is not present."""
        self._require(address, size, self.is_readable)
        return _load(self._pages, address, size)

    def write(self, address: int, data: bytes) -> None:
        """Write ``data`` to memory; raise ``AddressFault``, and write nothing, if a page is not writable."""
        self._require(address, len(data), self.is_writable)
        _store(self._pages, address, data)

    def is_readable(self, address: int) -> bool:
        """Return whether the page of ``address`` is present."""
        return address // PAGE in self._pages

    def is_writable(self, address: int) -> bool:
        """Return whether the page of ``address`` is present and not read-only."""
        return self.is_readable(address) and address // PAGE not in self._read_only

    def _require(self, address: int, size: int, is_allowed: Callable[[int], bool]) -> None:
        """Raise ``AddressFault`` for the first byte of the range for which ``is_allowed`` returns false."""
        position = address
        while position < address + size:
            if not is_allowed(position):
                raise AddressFault(position)
            position = (position // PAGE + 1) * PAGE

    def linear_address(self, selector: int, offset: int, size: int = 0, *, write: bool = False) -> int:  # noqa: ARG002
        """Return the base of a segment plus ``offset``; raise ``SelectorFault`` beyond its last offset."""
        if selector not in self.segments:
            raise SelectorFault(selector)
        segment = self.segments[selector]
        base, last = segment if isinstance(segment, tuple) else (segment, self.architecture.word_mask)
        if offset + max(1, size) - 1 > last:
            raise SelectorFault(selector)
        return (base + offset) & self.architecture.word_mask

    def read_physical(self, address: int, size: int) -> bytes:
        """Return ``size`` bytes of physical memory; raise ``AddressFault`` if a page is not present."""
        self._require(address, size, self._is_physical)
        return _load(self._physical, address, size)

    def write_physical(self, address: int, data: bytes) -> None:
        """Write ``data`` to physical memory; raise ``AddressFault``, and write nothing, if a page is not present."""
        self._require(address, len(data), self._is_physical)
        _store(self._physical, address, data)

    def _is_physical(self, address: int) -> bool:
        return address // PAGE in self._physical

    def physical_address(self, address: int) -> int:
        """Return a byte's physical address; raise ``AddressFault`` if ``page_frames`` lacks its page."""
        frame = self.page_frames.get(address & -PAGE)
        if frame is None:
            raise AddressFault(address)
        return frame + address % PAGE

    def read_port(self, port: int, size: int) -> int:
        """Return the value of a port of ``size`` bytes; all bits are 1 if ``ports`` lacks the port."""
        return self.ports.get(port, -1) & ((1 << 8 * size) - 1)

    def write_port(self, port: int, size: int, value: int) -> None:
        """Append the write to ``port_writes``; ``ports`` is unchanged."""
        self.port_writes.append((port, size, value))

    def symbol_address(self, symbol: str) -> int:
        """Return the run-time address of a symbol; raise ``DprobesError`` if the context has none."""
        if symbol not in self.symbols:
            raise DprobesError(f"the context has no symbol '{symbol}'", hint="give it in FakeContext(symbols=...)")
        return self.symbols[symbol]

    def pid(self) -> int:
        """Return the process id of the simulated process."""
        return self.ids["pid"]

    def kernel_stack(self) -> list[int]:
        """Return the addresses of the call stack in the kernel, innermost first."""
        return self.frames_in_kernel

    def user_stack(self, frames: int) -> list[int]:
        """Return up to ``frames`` addresses of the probed program's call stack, innermost first."""
        return self.frames_in_program[:frames]

    def traced_field(self, name: str) -> int:
        """Return the value of a tracepoint's field; raise ``AddressFault`` with 0 if the field does not exist."""
        if name not in self.traced_fields:
            raise AddressFault(0)
        return self.traced_fields[name]

    def entry_time(self) -> int:
        """Return the time of the call's entry in nanoseconds; raise ``AddressFault`` (UNSEEN_ENTRY) if unseen."""
        if self.entry is None:
            raise AddressFault(UNSEEN_ENTRY)
        return self.entry.get("time", 0)

    def entry_register(self, index: int) -> int:
        """Return a register at the call's entry, 0 if it was not set; raise as ``entry_time`` does."""
        self.entry_time()
        return self._by_index(self._registers_at_entry()).get(index, 0)

    def entry_counter(self, number: int) -> int | None:
        """Return a performance counter at the entry, or None if it was not set."""
        self.entry_time()
        return (self.entry or {}).get(COUNTERS[number].name)

    def _registers_at_entry(self) -> dict[str, int]:
        others = {"time", *(counter.name for counter in COUNTERS)}
        return {name: value for name, value in (self.entry or {}).items() if name not in others}

    def tid(self) -> int:
        """Return the thread id of the simulated thread."""
        return self.ids["tid"]

    def uid(self) -> int:
        """Return the real user id of the simulated process."""
        return self.ids["uid"]

    def cpu(self) -> int:
        """Return the number of the CPU on which the simulated hit occurs."""
        return self.ids["cpu"]

    def process_name(self) -> bytes:
        """Return the first 15 bytes of the process's name, without a NUL."""
        return self.comm.encode("utf-8", "surrogateescape")[: PROCESS_NAME_SIZE - 1]

    def task(self) -> int:
        """Return the address of the thread's task_struct."""
        return self.ids["task"]

    def counter(self, number: int) -> int | None:
        """Return a performance counter, or None if the thread has none of this number."""
        return self.counters.get(COUNTERS[number].name)

    def time(self) -> int:
        """Return the simulated CLOCK_MONOTONIC in nanoseconds."""
        return self.ids["time"]

    def call_extension(self, name: str | None, machine: Machine) -> None:
        """Append the name to ``extension_calls``, and call the extension of that name; None: all extensions."""
        self.extension_calls.append(name)
        call_extensions(self.extensions, name, machine, self.warnings.append)


def _pages_of(address: int, data: bytes) -> range:
    return range(address // PAGE, (address + max(1, len(data)) - 1) // PAGE + 1)


def _load(pages: Mapping[int, bytearray], address: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        page, offset = divmod(address + len(data), PAGE)
        data += pages[page][offset : offset + size - len(data)]
    return bytes(data)


def _store(pages: Mapping[int, bytearray], address: int, data: bytes) -> None:
    done = 0
    while done < len(data):
        page, offset = divmod(address + done, PAGE)
        part = data[done : done + PAGE - offset]
        pages[page][offset : offset + len(part)] = part
        done += len(part)


def header_of(context: FakeContext, items: Item) -> LogRecord:
    """Return a record of a hit with the header items ``items``; major, minor and missing registers are 0."""
    values: dict[str, Any] = {**context.ids, "major": 0, "minor": 0}
    for name, register in _HEADER_REGISTERS.items():
        is_there = context.architecture.register(register) is not None
        values[name] = context.value_of(register) if is_there else 0
    return LogRecord(
        **{name: values[name] for item, name in FIXED_ITEMS if item & items},
        tid=context.tid() if items & Item.TID else None,
        word_size=8 if context.architecture.word_size == 8 else 4,
        byte_order=context.architecture.byte_order,
    )


_HEADER_REGISTERS = {"cs": "cs", "ip": "pc", "ss": "ss", "sp": "sp"}
