"""
Watchpoints in a module: debug registers of all CPUs, at the module's addresses in the processes in scope.

A symbol has another address in each process, but a CPU has only four debug registers. One register serves all processes
with the same load bias, for example those forked from one process, or all processes of an executable that is not
position-independent. BPF programs record in MAPPERS which processes map the module. They run at the module's first
instruction in a process, and when the process forks, calls execve or ends. Handlers look up the process in MAPPERS, so
accesses in other processes do not count.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import threading
import time
from typing import TYPE_CHECKING

from dprobes.bpf.bpf_assembler import Assembled, Assembler
from dprobes.bpf.bpf_instructions import LOOPS_MAX, NO_OVERWRITE, Alu, Helper, Jump, Register, RingOutput, Size
from dprobes.bpf.lower.hosts.hit_thread import REGISTER_OFFSETS, write_filter
from dprobes.bpf.lower.hosts.vma_lookup import PagingQuestion
from dprobes.bpf.lower.lowering_request import Abilities
from dprobes.bpf.map_layouts import ARRIVAL, MapName, Status
from dprobes.engines.ebpf.attach.code_mappers import find_mappers
from dprobes.engines.ebpf.attach.perf_probes import IN_USE, Watch
from dprobes.engines.ebpf.attach.process_programs import (
    add_to_status,
    begin_exit,
    begin_fork,
    delete,
    load_argument,
    load_process,
    look_up,
    point_to_stack,
    update,
)
from dprobes.engines.ebpf.kernel.bpf_links import (
    UprobeLinks,
    attach_tracepoints,
    attach_uprobes,
    uprobe_attach_type,
)
from dprobes.engines.ebpf.kernel.bpf_objects import HashMap, RingBuffer, explained, finished, load
from dprobes.engines.ebpf.kernel.kernel_features import Feature, KernelTypes
from dprobes.engines.ebpf.kernel.task_structures import paging_layout
from dprobes.engines.engine_interface import Notice, StateEvent
from dprobes.platform.linux.bpf_calls import ProgramFlag, ProgramType
from dprobes.target.code.machine_code import decode_at
from dprobes.target.code.uprobe_sites import refusal
from dprobes.target.module_outline import first_executed_in, last_executed_in
from dprobes.target.process_maps import run_time_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from dprobes.bpf.lower.lowering_request import Filter
    from dprobes.engines.ebpf.attach.code_mappers import Mapper
    from dprobes.engines.ebpf.attach.map_objects import SharedMaps
    from dprobes.engines.ebpf.kernel.bpf_objects import Descriptors
    from dprobes.engines.ebpf.kernel.kernel_features import Features
    from dprobes.engines.engine_interface import Event
    from dprobes.resolve.probepoints import ResolvedModule, WatchedMemory
    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.process_maps import Mapping as MemoryMapping

__all__ = ["ModuleWatch", "arrival_program", "departure_program", "exec_program", "fork_program", "leave_program"]

# Watchpoints must be attached for a new load bias first. So the BPF program reports the bias to user space (ARRIVALS),
# and makes the process wait in the kernel for a limited time: no other process can see the wait. A forked child has the
# same load bias; execve unmaps the module.
#
# A BPF program cannot sleep until it is woken up. So it polls; a sleepable one yields the CPU each time.


R0, R1, R2, R3, R4, R5 = (Register(number) for number in range(6))
R6, R7, R10 = Register.R6, Register.R7, Register.R10

WAITING_TIME = 0.5
"""Maximum number of seconds that a process waits for its watchpoints."""

_NANOSECONDS = 1_000_000_000

_KEY = -4
_ENTRY = -24
"""Offset on the stack of the entry of ARRIVALS: u32 process id, u64 load bias."""
_BIAS_PLACE = _ENTRY + 8
_SINCE = -32
_STACK = -40
"""Offset on the stack of the process's stack pointer, an address that the process can read."""


def arrival_program(scope: Filter, abilities: Abilities) -> Assembled:
    """
    Return the BPF program for the uprobes at the module's first instructions, where a thread waits for watchpoints.

    The cookie of such a uprobe is the link address of its instruction. ``scope`` has the conditions for a process to
    wait.
    """
    asm = Assembler()
    out, new, mapped, full, waiting = (asm.label() for _ in range(5))
    asm.mov(R6, R1)
    write_filter(asm, scope, lambda: load_process(asm), out)
    asm.mov(R1, R6)
    asm.call(Helper.GET_ATTACH_COOKIE)
    asm.load(R7, R6, REGISTER_OFFSETS["eip"])
    asm.alu(Alu.SUB, R7, R0)
    asm.store(R10, _ENTRY, 0)
    asm.store(R10, _BIAS_PLACE, R7)
    load_process(asm)
    asm.store(R10, _ENTRY, R0, Size.W)
    look_up(asm, MapName.MAPPERS, _ENTRY)
    asm.jump_if(Jump.JEQ, R0, 0, new)
    asm.load(R1, R0, 0)
    asm.jump_if(Jump.JEQ, R1, R7, out)  # another of the module's first instructions has been hit before
    asm.place(new)
    update(asm, MapName.MAPPERS, _ENTRY, _BIAS_PLACE, 0)
    asm.jump_if(Jump.JEQ, R0, 0, mapped)
    asm.place(full)
    add_to_status(asm, Status.LATE, 1)
    asm.jump(out)
    asm.place(mapped)
    look_up(asm, MapName.BIASES, _BIAS_PLACE)
    asm.jump_if(Jump.JNE, R0, 0, out)
    asm.load_map(R1, MapName.ARRIVALS)
    point_to_stack(asm, R2, _ENTRY)
    asm.mov(R3, ARRIVAL.size)
    asm.mov(R4, RingOutput.FORCE_WAKEUP)
    asm.call(Helper.RINGBUF_OUTPUT)
    asm.jump_if(Jump.JNE, R0, 0, full)
    asm.call(Helper.KTIME_GET_NS)
    asm.store(R10, _SINCE, R0)
    asm.load(R1, R6, REGISTER_OFFSETS["esp"])
    asm.store(R10, _STACK, R1)
    asm.mov(R1, LOOPS_MAX)
    asm.load_function(R2, waiting)
    point_to_stack(asm, R3, _STACK)
    asm.mov(R4, 0)
    asm.call(Helper.LOOP)
    asm.place(out)
    asm.mov(R0, 0)
    asm.exit()
    _wait_a_turn(asm, waiting, abilities)
    return asm.assemble()


def _wait_a_turn(asm: Assembler, entry: int, abilities: Abilities) -> None:
    """
    Write the callback of bpf_loop, at the label ``entry``, which polls until the watchpoints are attached.

    Its argument R2 points to the caller's stack, from ``_STACK`` on. It returns 1 to end the loop.
    """
    done, late, again = asm.label(), asm.label(), asm.label()
    paging = PagingQuestion(asm, abilities)
    asm.function(entry)
    asm.mov(R6, R2)
    asm.load_map(R1, MapName.BIASES)
    asm.alu(Alu.ADD, R2, _BIAS_PLACE - _STACK)
    asm.call(Helper.MAP_LOOKUP_ELEM)
    asm.jump_if(Jump.JNE, R0, 0, done)
    asm.call(Helper.KTIME_GET_NS)
    asm.load(R1, R6, _SINCE - _STACK)
    asm.alu(Alu.SUB, R0, R1)
    asm.jump_if(Jump.JGT, R0, int(WAITING_TIME * _NANOSECONDS), late)
    if abilities.sleepable:
        # Access to the page of another process' memory (here: of the same process) begins with cond_resched().
        asm.load(R1, R6, 0)
        asm.mov(R2, 1)
        paging.ask()
        asm.jump_if(Jump.JNE, R0, 0, again)
        asm.call(Helper.GET_CURRENT_TASK_BTF)
        asm.mov(R4, R0)
        asm.load(R3, R6, 0)
        asm.mov(R2, 1)
        point_to_stack(asm, R1, -8)
        asm.mov(R5, 0)
        asm.call(Helper.COPY_FROM_USER_TASK)
    asm.place(again)
    asm.mov(R0, 0)
    asm.exit()
    asm.place(late)
    add_to_status(asm, Status.LATE, 1)
    asm.place(done)
    asm.mov(R0, 1)
    asm.exit()
    paging.write_functions()


def _forget(asm: Assembler, process: Register) -> None:
    asm.store(R10, _KEY, process, Size.W)
    delete(asm, MapName.MAPPERS, _KEY)


def departure_program() -> Assembled:
    """
    Return the BPF program for the uprobe on the last function that a library executes before it is unmapped.

    The BPF program removes the process from MAPPERS.
    """
    asm = Assembler()
    load_process(asm)
    _forget(asm, R0)
    return finished(asm)


def fork_program(types: KernelTypes) -> Assembled:
    """Return the BPF program on ``sched_process_fork(parent, child)``, which runs before the child does."""
    asm = Assembler()
    out, full = asm.label(), asm.label()
    begin_fork(asm, types, out)
    asm.store(R10, _KEY, R4, Size.W)
    look_up(asm, MapName.MAPPERS, _KEY)
    asm.jump_if(Jump.JEQ, R0, 0, out)
    asm.load(R1, R0, 0)
    asm.store(R10, _BIAS_PLACE, R1)
    asm.store(R10, _KEY, R6, Size.W)
    update(asm, MapName.MAPPERS, _KEY, _BIAS_PLACE, NO_OVERWRITE)
    asm.jump_if(Jump.JNE, R0, 0, full)
    asm.jump(out)
    asm.place(full)
    add_to_status(asm, Status.LATE, 1)
    asm.place(out)
    return finished(asm)


def exec_program(types: KernelTypes) -> Assembled:
    """Return the BPF program on ``sched_process_exec(task, ...)``, which runs before the executed file's code."""
    asm = Assembler()
    load_argument(asm, R2, 0)
    asm.load(R3, R2, types.member_offset("task_struct", "tgid"), Size.W)
    _forget(asm, R3)
    return finished(asm)


def leave_program(types: KernelTypes) -> Assembled:
    """Return the BPF program on ``sched_process_exit(task)``, which deletes the entry with a process's last thread."""
    asm = Assembler()
    out = asm.label()
    begin_exit(asm, types)
    asm.jump_if(Jump.JNE, R4, 0, out)
    _forget(asm, R6)
    asm.place(out)
    return finished(asm)


_PROCESSES = 1 << 14
_PLACES = 1 << 10
_RING_SIZE = 1 << 16
_SWEEP_INTERVAL = 1.0
"""Interval in seconds at which debug registers without a process are released."""

_PID = struct.Struct("=I")
_BIAS_FORMAT = struct.Struct("=Q")
_KNOWN = b"\1\0\0\0"


class ModuleWatch:
    """
    Watch on a module's memory: ``add`` each watchpoint, then ``start``, and call ``happened`` regularly.

    ``reached`` is a path to the module's file. ``is_in_scope`` returns True if an existing process is in scope.
    """

    def __init__(
        self,
        resolved: ResolvedModule,
        reached: str,
        scope: Filter,
        shared: SharedMaps,
        features: Features,
        is_in_scope: Callable[[int], bool],
    ) -> None:
        self._resolved = resolved
        self._reached = reached
        self._scope = scope
        self._shared = shared
        self._features = features
        self._is_in_scope = is_in_scope
        self._lock = threading.Lock()
        self._watches: list[Watch] = []
        self._places: dict[int, bool] = {}
        """The watched load biases. If the value is True, the bias is watched even without a process."""
        self._events: list[Event] = []
        self._late = 0
        self._thread: threading.Thread | None = None
        self._links = UprobeLinks()
        with explained("the maps for watching a module"), contextlib.ExitStack() as stack:
            self._mappers = stack.enter_context(
                HashMap(_PID.size, _BIAS_FORMAT.size, _PROCESSES, "dprobes_mappers", preallocated=True)
            )
            self._biases = stack.enter_context(HashMap(_BIAS_FORMAT.size, len(_KNOWN), _PLACES, "dprobes_biases"))
            self._arrivals = stack.enter_context(RingBuffer(_RING_SIZE, "dprobes_arrivals"))
            self._wake_up = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            stack.callback(os.close, self._wake_up)
            self._stack = stack.pop_all()

    @property
    def maps(self) -> Mapping[MapName, int]:
        """Descriptors of all maps, for the handlers of this module's watchpoints."""
        return {
            **self._shared.descriptors,
            MapName.MAPPERS: self._mappers.fd,
            MapName.BIASES: self._biases.fd,
            MapName.ARRIVALS: self._arrivals.fd,
        }

    def add(self, number: int, memory: WatchedMemory, program: int) -> Watch:
        """
        Add the watchpoint with the number ``number``, and return its breakpoints.

        ``program`` is the descriptor of its loaded handler. The caller closes the result.
        """
        watch = Watch(number, memory, program, self._lock, self._look_at_end)
        self._watches.append(watch)
        return watch

    # Start

    def start(self) -> None:
        """Attach the watchpoints for existing and future processes; a second call does nothing."""
        if self._thread is not None:
            return
        if self._resolved.module.elf.is_pie_or_shared:
            with self._lock:
                self._attach([watch for watch in self._watches if watch.is_absolute], 0, 0)
                self._prepare()
        else:
            self._watch(0, 0, always=True)
        self._thread = threading.Thread(target=self._serve, name="watching", daemon=True)
        self._thread.start()
        with explained("the program that detects processes with a module"):
            self._follow()
        known: set[int] = set()
        # A second search finds processes that the found ones have started meanwhile.
        while new := [m for m in find_mappers(self._reached) if self._is_in_scope(m.pid) and m.pid not in known]:
            for mapper in new:
                known.add(mapper.pid)
                self._adopt(mapper)
        with self._lock:
            self._prepare()

    def _follow(self) -> None:
        """Attach the BPF programs at fork, exec and exit, which update the map MAPPERS."""
        features, maps = self._features, self.maps
        sleepable = Feature.SLEEPABLE_UPROBE in features
        abilities = Abilities(sleepable=sleepable, user=os.geteuid(), paging=paging_layout(features))
        program = load(
            arrival_program(self._scope, abilities),
            maps,
            ProgramType.KPROBE,
            attach_type=uprobe_attach_type(features),
            flags=ProgramFlag.SLEEPABLE if sleepable else ProgramFlag.NONE,
            name="dprobes_arrival",
        )
        self._links.add(program)
        with KernelTypes() as types:
            programs = {tracepoint: make(types) for tracepoint, make in _TRACEPOINTS.items()}
            self._add_links(attach_tracepoints(programs, maps, types))
        module = self._resolved.module
        shown = str(module.path)
        kind, attach_type = ProgramType.KPROBE, uprobe_attach_type(features)
        departure = load(departure_program(), maps, kind, attach_type=attach_type, name="dprobes_leave")
        self._links.add(departure)
        if leaving := self._places_of(last_executed_in(module)):
            self._add_links(attach_uprobes(departure, self._reached, leaving, features, shown=shown))
        if places := self._places_of(first_executed_in(module)):
            self._add_links(attach_uprobes(program, self._reached, places, features, shown=shown))
        else:
            message = f"the start of '{shown}' is unknown: it is not watched in processes that map it from now on"
            self._events.append(Notice(message))

    def _add_links(self, links: Descriptors) -> None:
        for link in links.detach():
            self._links.add(link)

    def _places_of(self, addresses: Iterable[int]) -> list[tuple[int, int]]:
        """Return file offset and link address of the instructions, at link addresses, that can have a uprobe."""
        module = self._resolved.module
        found = []
        for address in addresses:
            offset = module.elf.file_offset(address)
            if offset is not None and refusal(decode_at(module, offset), 8 * module.word_size, at_entry=True) is None:
                found.append((offset, address))
        return found

    # Processes

    def _adopt(self, mapper: Mapper) -> None:
        """Attach the watchpoints for a process that has mapped the module before the run began."""
        key = _PID.pack(mapper.pid)
        bias = load_bias(self._resolved.module.elf, mapper.mappings)
        while bias is not None:
            self._watch(bias, mapper.pid)
            self._mappers[key] = _BIAS_FORMAT.pack(bias)
            # The process may have executed another program meanwhile, or ended.
            seen = find_mappers(self._reached, [mapper.pid])
            now = load_bias(self._resolved.module.elf, seen[0].mappings) if seen else None
            if now == bias:
                return
            bias = now
        self._mappers.discard(key)

    def _watch(self, bias: int, pid: int, *, always: bool = False) -> None:
        """
        Attach all watchpoints for a load bias, and resume the threads that wait for them.

        ``pid`` is a process that maps the module with this bias. With ``always``, the watchpoints stay attached after
        no process maps the module there.
        """
        with self._lock:
            if bias not in self._places:
                self._attach(self._watches, bias, pid)
                self._places[bias] = always
            # If the map is full, a process that waits for the place continues after its waiting time, and counts as
            # late.
            with contextlib.suppress(OSError):
                self._biases[_BIAS_FORMAT.pack(bias)] = _KNOWN

    def _attach(self, watches: Sequence[Watch], bias: int, pid: int) -> None:
        for watch in watches:
            problem = watch.attach(bias)
            if problem is not None and problem[1] == IN_USE:
                self._sweep()
                problem = watch.attach(bias)
            if problem is not None:
                self._events.append(StateEvent((watch.number,), pid, *problem))

    def _prepare(self) -> None:
        for watch in self._watches:
            watch.prepare()

    def _sweep(self) -> None:
        """Release the debug registers for load biases at which no process maps the module. The caller has the lock."""
        used = self._used()
        for bias in [b for b, always in self._places.items() if not always and b not in used]:
            key = _BIAS_FORMAT.pack(bias)
            self._biases.discard(key)
            # A process that arrives from now on waits for this thread; another may have arrived before.
            if bias in self._used():
                self._biases[key] = _KNOWN
                continue
            del self._places[bias]
            for watch in self._watches:
                watch.release(bias)

    def _used(self) -> set[int]:
        found = set()
        for key in self._mappers:
            with contextlib.suppress(KeyError):
                found.add(_BIAS_FORMAT.unpack(self._mappers[key])[0])
        return found

    def _serve(self) -> None:
        """Attach watchpoints for the load biases that processes report in ARRIVALS, until ``close``."""
        poll = select.poll()
        poll.register(self._arrivals.fd, select.POLLIN)
        poll.register(self._wake_up, select.POLLIN)
        swept = time.monotonic()
        while not any(fd == self._wake_up for fd, _ in poll.poll(_SWEEP_INTERVAL * 1000)):
            arrived = self._arrivals.drain()
            for entry in arrived:
                pid, bias = ARRIVAL.unpack(entry)
                self._watch(bias, pid)
            if arrived:
                with self._lock:
                    self._prepare()
            if time.monotonic() - swept >= _SWEEP_INTERVAL:
                swept = time.monotonic()
                with self._lock:
                    self._sweep()

    # Events, and the end

    def happened(self) -> Iterator[Event]:
        """Iterate over the states and notices since the last call."""
        while self._events:
            yield self._events.pop(0)
        late: int = self._shared.status[Status.LATE // 8]
        if late > self._late:
            many = "a process" if late - self._late == 1 else f"{late - self._late} processes"
            path = self._resolved.module.path
            yield Notice(f"{many} continued before '{path}' was watched there; earlier accesses are not counted")
            self._late = late

    def _look_at_end(self) -> None:
        """Remove the BPF programs if the last watchpoint has been removed."""
        if all(watch.is_closed for watch in self._watches):
            with self._lock:
                self._links.close()

    def close(self) -> None:
        """Remove all watchpoints and BPF programs, and end the thread."""
        if self._thread is not None:
            os.eventfd_write(self._wake_up, 1)
            self._thread.join()
            self._thread = None
        for watch in self._watches:
            watch.close()
        self._look_at_end()
        self._stack.close()


_TRACEPOINTS = {
    "sched_process_fork": fork_program,
    "sched_process_exec": exec_program,
    "sched_process_exit": leave_program,
}


def load_bias(elf: ElfFile, mappings: Sequence[MemoryMapping]) -> int | None:
    """Return the load bias of a file, given its executable mappings in a process, or None if it is unknown."""
    for segment in elf.load_segments:
        if segment.executable and (address := run_time_address(mappings, segment.offset)) is not None:
            return address - segment.vaddr
    return None
