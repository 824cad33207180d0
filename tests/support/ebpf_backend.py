"""
Handlers compiled to eBPF as a back end of the tests: the kernel runs them, on memory and registers that are made up.

``BPF_PROG_TEST_RUN`` runs a SYSCALL program in this process: its argument is a made-up ``pt_regs``, and
the memory of ``FakeContext`` is mapped into this process at the very addresses (``ebpf_world``).
"""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from dprobes.arch import architecture
from dprobes.bpf.lower import Abilities, LoopForm, Lowered, Placement, Request, Tables, lower
from dprobes.bpf.lower.hits.call_entries import entry_size
from dprobes.bpf.lower.hosts.hit_thread import REGISTER_OFFSETS
from dprobes.bpf.lower.lowering_request import KeptEntry
from dprobes.bpf.lower.state.handler_state import ABORT, CELLS, EXIT, EXIT_WITH, REMOVE_PROBE, SKIP, Field
from dprobes.bpf.map_layouts import (
    COUNTER_UNREAD,
    CPU_LOAD_SIZE,
    ENTRY_HEAD,
    NAME_SIZE,
    NOTE_SIZE,
    PROBE_ENTRY_SIZE,
    PROBE_LOAD_SIZE,
    STATUS_SIZE,
    TALLY,
    CpuLoad,
    Entry,
    MapName,
    ProbeField,
    ProbeLoad,
    power_of_two,
)
from dprobes.engines.ebpf.kernel.bpf_objects import (
    ArrayMap,
    HashMap,
    KernelTables,
    LruHashMap,
    RingBuffer,
    load,
    loadable,
)
from dprobes.engines.keyed_table_maps import TableMaps, zeros_size
from dprobes.keyed.table_entries import TableStore, cells_of
from dprobes.platform.linux.bpf_calls import ProgramFlag, ProgramRunner, ProgramType, verifier_log
from dprobes.record.log_record import PROCESS_NAME_MAX, Item, LogRecord, decode_record
from dprobes.rpn.instruction_encoding import CodeImage, decode_all
from dprobes.rpn.instruction_set import RPN_STACK_CELLS, Group, rows_by_syntax
from dprobes.rpn.keyed_tables import TableKind
from dprobes.testing import FakeContext
from dprobes.vm import Ending, Outcome, Point
from support.ebpf_abilities import abilities
from support.ebpf_world import host_of, memory_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dprobes.arch import Architecture
    from dprobes.arch import Register as CpuRegister
    from dprobes.bpf.lower.hosts.handler_host import Host
    from dprobes.keyed.table_layout import TableContents

__all__ = ["EbpfRunner", "FinalState", "RejectedError", "Stage", "obstacle"]

_REGISTERS_SIZE, _EVENT_SIZE, _EVENT_ADDRESS = 168, 184, 176
_PROBES, _PROBE = 4, 2
"""The number of entries of the probe table, and the index of the probepoint."""


COUNTERS_KEPT = tuple(range(4))
"""The performance counters whose values are stored at the entry of a call."""


class RejectedError(AssertionError):
    """The verifier rejects a program; the message has its log."""


def store_of(contents: TableContents) -> TableStore:
    """Return a keyed table with these rows."""
    memory = memoryview(bytearray(8 * cells_of(contents.table))).cast("Q")
    memory[0], memory[1] = contents.lost, len(contents.rows)
    position = 2
    for key, cells in sorted(contents.rows):
        words = [1, *memoryview(key).cast("Q"), *cells]
        for word in words:
            memory[position] = word
            position += 1
    return TableStore(contents.table, memory)


def _looked_at(image: CodeImage) -> set[int | str]:
    """
    Return the tables whose values the program reads.

    Such tables have common values for all CPUs: the program could not distinguish the values of each CPU.
    """
    return {
        each.operand
        for each in decode_all(image.data, image.word_size, image.byte_order)
        if each.row is not None and each.row.group is Group.TABLE and each.row.operator != "tally"
    }


class FinalState(NamedTuple):
    """The state after a run: cells of the RPN stack, TSP, entries of the ring buffer, and the record."""

    cells: tuple[int, ...]
    tsp: int
    entries: tuple[tuple[Entry, int, bytes], ...]
    """Kind, thread id and body."""
    record: LogRecord | None

    def peek(self, index: int = 0) -> int:
        return self.cells[(self.tsp + index) % RPN_STACK_CELLS]


_PUSH_COUNTER = rows_by_syntax()["push elapsed, <counter>"].opcode


class EbpfRunner:
    """
    A runner of the handlers of one program in eBPF; a context manager.

    ``request`` has further options: limits, items, placement. If its ``probe`` is None, the handler finds its
    probepoint in the probe table, with ``request.moved`` and ``link``. ``host`` replaces the host with simulated
    identities.
    """

    def __init__(
        self,
        image: CodeImage,
        architecture: Architecture,
        context: FakeContext,
        loops: LoopForm | None = None,
        *,
        sleepable: bool = True,
        request: Request = Request(probe=_PROBE),  # noqa: B008 - frozen
        host: type[Host] | None = None,
        keeps_stack: bool = True,
    ) -> None:
        self._image = image
        self._architecture = architecture
        self._context = context
        lv, gv, cv = self._sizes = (
            len(context.local_variables),
            len(context.global_variables),
            len(context.cpu_variables()),
        )
        tv = len(context.thread_variables())
        self._tables: TableMaps[Any, Any] | None = None
        self._thread_values = "<" + str(power_of_two(tv)) + "Q"
        shared = self.shared_tables(image)
        has_counters = self.abilities(loops, sleepable=sleepable).counters is not None
        self._request = replace(
            request,
            abilities=self.abilities(loops, sleepable=sleepable)._replace(small_states=request.abilities.small_states),
            tables=Tables(states=1, cpus=8, probes=_PROBES),
            vars=lv,
            gvars=gv,
            cvars=cv,
            tvars=tv,
            shared_tables=shared,
            entry=KeptEntry(
                tuple((r.name, r.index, r.memory_offset) for r in self._kept_registers()),
                # All that a call can keep takes so much of the BPF stack that nested callbacks find no room.
                counters=COUNTERS_KEPT if has_counters and _PUSH_COUNTER in image.data else (),
            ),
            symbols=context.symbols,
            extensions={n: e.compile for n, e in context.extensions.items() if e.compile is not None},
            keeps_stack=keeps_stack,
        )
        self._written = context.value_of("eip")
        self._host = host
        if not self._request.link:  # so that link addresses are those of the made-up world
            self._request = replace(self._request, link=self._written)
        self._maps: dict[MapName, Any] = {}
        self._programs: dict[tuple[int, Point], tuple[Lowered, Any, int]] = {}
        self.lowered: Lowered | None = None

    def abilities(self, loops: LoopForm | None, *, sleepable: bool) -> Abilities:
        return abilities(loops, sleepable=sleepable)

    def shared_tables(self, image: CodeImage) -> frozenset[int]:
        if not image.tables:
            return frozenset()
        looked_at = _looked_at(image)
        return frozenset(n for n, table in enumerate(image.tables) if n in looked_at or table.kind is TableKind.LAST)

    def array(self, size: int) -> Any:
        return ArrayMap(size)

    def hash(self, key_size: int, value_size: int, entries: int) -> Any:
        return HashMap(key_size, value_size, entries, preallocated=True)

    def ring(self, size: int) -> Any:
        return RingBuffer(size)

    def notes(self, entries: int) -> Any:
        return LruHashMap(4, NOTE_SIZE, entries)

    def table_maps(self) -> TableMaps[Any, Any]:
        return KernelTables(self._image.tables, self._request.shared_tables, 8)

    def __enter__(self) -> Self:
        lv, gv, cv = self._sizes
        array, hashed = self.array, self.hash
        self._maps = {
            MapName.CLAIMS: array(8),
            MapName.PROBES: array(PROBE_ENTRY_SIZE * _PROBES),
            MapName.STATUS: array(STATUS_SIZE),
            MapName.LOCALS: array(8 * power_of_two(lv)),
            MapName.GLOBALS: array(8 * power_of_two(gv)),
            MapName.CPU_VARIABLES: array(8 * power_of_two(cv) * 8),
            MapName.THREAD_VARIABLES: hashed(8, struct.calcsize(self._thread_values), 4),
            MapName.ZEROS: array(max(struct.calcsize(self._thread_values), zeros_size(self._image.tables))),
            MapName.ENTRIES: hashed(32, entry_size(self._kept_entry), 4),
            MapName.SPACES: hashed(4, 8, 4),
            MapName.RING: self.ring(1 << 18),
            MapName.NOTES: self.notes(64),
            MapName.CPU_LOAD: array(CPU_LOAD_SIZE * 8),
            MapName.PROBE_LOAD: array(PROBE_LOAD_SIZE * _PROBES),
        }
        if self._image.tables:
            self._tables = self.table_maps()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._tables is not None:
            self._tables.__exit__()
        for _, scratch, program in self._programs.values():
            self._unload(program)
            scratch.close()
        self._programs.clear()
        for each in self._maps.values():
            each.close()
        self._maps.clear()

    @property
    def _cookie(self) -> int:
        return _PROBE | (self._request.moved & 0xFFFF_FFFF) << 32

    def compile(self, start: int, point: Point) -> Lowered:
        host = self._host or host_of(self._context, self._cookie, self._written)
        return lower(self._image, self._architecture, start, point, self._request, host)

    def run(self, start: int, point: Point) -> tuple[Outcome, FinalState]:
        """
        Reset the counts of the probepoint, run the handler at ``start``, and copy variables into the context.

        Return the outcome and the final state; raise ``RejectedError`` if the verifier rejects the program.
        """
        table = self._table()
        for n in range(len(table)):
            table[n] = 0
        found = self.hit(start, point)
        assert found is not None, "the handler has not run"
        return found

    def hit(self, start: int, point: Point) -> tuple[Outcome, FinalState] | None:
        """Do the same as ``run`` without resetting counts; return None if these prevented the handler from running."""
        words = self._hit(start, point)
        claims = self._maps[MapName.CLAIMS]
        assert claims.words[0] == 0, "the state was not given back"
        found = self._outcome(words, point)
        if self._tables is not None:
            self._context.keyed_tables = [store_of(contents) for contents in self._tables.contents()]
        return found

    def miss(self, start: int, point: Point) -> list[tuple[Entry, int, bytes]]:
        """
        Run the program while all states are in use; return kind, thread id and body of its ring buffer entries.

        They report a missed hit.
        """
        claims = self._maps[MapName.CLAIMS]
        claims.words[0] = 1
        words = self._hit(start, point)
        assert words[Field.ENDING // 8] == _NOT_RUN
        assert claims.words[0] == 1
        claims.words[0] = 0
        return self._entries()

    def _hit(self, start: int, point: Point) -> memoryview:
        """Execute the program once, loading it at its first hit; return the words of the state."""
        if (start, point) not in self._programs:
            lowered = self.compile(start, point)
            scratch = self.array(lowered.state.size)
            self._programs[start, point] = lowered, scratch, self._load(lowered, scratch)
        self.lowered, scratch, program = self._programs[start, point]
        self._write_variables()
        self._write_entry()
        self._write_probe(point)
        scratch.memory[:] = _LEFT_BEHIND * len(scratch.memory)
        scratch.words[Field.ENDING // 8] = _NOT_RUN
        self._execute(program)
        self._read_variables()
        words: memoryview = scratch.words
        return words

    def _execute(self, program: int) -> None:
        """Execute a loaded program with the registers and the memory of the context; ``program`` is its descriptor."""
        with memory_of(self._context):
            ProgramRunner(program, bytearray(self._registers())).run()

    def _unload(self, program: int) -> None:
        os.close(program)

    def _descriptors(self, scratch: Any) -> dict[MapName, int]:
        tables = {name: each.fd for name, each in self._tables.maps.items()} if self._tables is not None else {}
        return {name: each.fd for name, each in self._maps.items()} | tables | {MapName.SCRATCH: scratch.fd}

    def _load(self, lowered: Lowered, scratch: Any) -> int:
        maps = self._descriptors(scratch)
        try:
            return load(lowered.assembled, maps, ProgramType.SYSCALL, flags=ProgramFlag.SLEEPABLE)
        except OSError as error:
            with loadable(lowered.assembled, maps, ProgramType.SYSCALL, flags=ProgramFlag.SLEEPABLE) as program:
                raise RejectedError(f"{error}\n{verifier_log(program)[-3000:]}") from None

    def _table(self) -> memoryview:
        probes = self._maps[MapName.PROBES]
        words: memoryview = probes.words
        return words

    def count(self, field: ProbeField) -> int:
        """Return the 64-bit field of the probepoint in the map of probes."""
        value: int = self._table()[(PROBE_ENTRY_SIZE * _PROBE + field) // 8]
        return value

    def load(self, field: ProbeLoad) -> int:
        """Return the 64-bit field of the probepoint in the map of measured loads."""
        value: int = self._load_words()[(PROBE_LOAD_SIZE * _PROBE + field) // 8]
        return value

    def set_thinning(self, thinning: int, cost: int = 0) -> None:
        """Let only one of ``thinning`` hits run the handler; ``cost`` is added to that of each hit, in nanoseconds."""
        self._load_words()[(PROBE_LOAD_SIZE * _PROBE + ProbeLoad.THINNING) // 8] = thinning | cost << 32

    def _load_words(self) -> memoryview:
        loads = self._maps[MapName.PROBE_LOAD]
        words: memoryview = loads.words
        return words

    def cpu_loads(self, field: CpuLoad) -> list[int]:
        """Return a field of each CPU in the map of measured loads."""
        loads = self._maps[MapName.CPU_LOAD]
        return list(loads.words[field // 8 :: CPU_LOAD_SIZE // 8])

    def brake(self, until: int) -> None:
        """Prevent handlers on all CPUs until the monotonic time ``until`` in nanoseconds."""
        loads = self._maps[MapName.CPU_LOAD]
        for cpu in range(8):
            loads.words[(cpu * CPU_LOAD_SIZE + CpuLoad.BRAKED) // 8] = until

    def _write_probe(self, point: Point) -> None:
        at = PROBE_ENTRY_SIZE * _PROBE
        self._table()[(at + ProbeField.LINK) // 8] = self._request.link
        self._table()[(at + ProbeField.OFFSET) // 8] = point.offset & 0xFFFF_FFFF_FFFF_FFFF

    def _registers(self) -> bytes:
        is_event = self._request.placement is Placement.EVENT
        data = bytearray(_EVENT_SIZE if is_event else _REGISTERS_SIZE)
        if is_event:
            struct.pack_into("=Q", data, _EVENT_ADDRESS, self._request.link)
        request, word = self._request, self._architecture.word_size
        for name, offset in REGISTER_OFFSETS.items():
            if self._architecture.register(name) is None:
                continue
            value = self._context.value_of(name)
            if name == "eip" and request.placement is Placement.BREAKPOINT:
                value += request.moved
            if name == "esp" and request.placement is Placement.RET_SITE:
                value -= word + request.return_bytes
            struct.pack_into("=Q", data, offset, value & 0xFFFF_FFFF_FFFF_FFFF)
        return bytes(data)

    def _variables(self) -> Iterable[tuple[ArrayMap, int, list[int]]]:
        cv = self._sizes[2]
        cpu = self._context.ids["cpu"] & 7
        for name, first, values in (
            (MapName.LOCALS, 0, self._context.local_variables),
            (MapName.GLOBALS, 0, self._context.global_variables),
            (MapName.CPU_VARIABLES, cpu * power_of_two(cv), self._context.cpu_variables()),
        ):
            yield self._maps[name], first, values  # type: ignore[misc]

    def _write_variables(self) -> None:
        for each, first, values in self._variables():
            for n, value in enumerate(values):
                each.words[first + n] = value
        threads, values = self._thread_variables()
        if threads.discard(key := self._thread_key()) or any(values):
            spare = struct.calcsize(self._thread_values) // 8 - len(values)
            threads[key] = struct.pack(self._thread_values, *values, *[0] * spare)

    def _read_variables(self) -> None:
        for each, first, values in self._variables():
            values[:] = [each.words[first + n] for n in range(len(values))]
        threads, values = self._thread_variables()
        if (key := self._thread_key()) in threads:
            values[:] = struct.unpack(self._thread_values, threads[key])[: len(values)]

    def _kept_registers(self) -> list[CpuRegister]:
        """Return all registers that can be stored at the entry of a call."""
        return [register for register in self._architecture.registers if register.is_kept_at_entry]

    @property
    def _kept_entry(self) -> KeptEntry:
        assert self._request.entry is not None
        return self._request.entry

    def _write_entry(self) -> None:
        """Store the entry of the returning call in the map of entries, with the values of the context, or remove it."""
        entries, spaces = self._maps[MapName.ENTRIES], self._maps[MapName.SPACES]
        request, context, word = self._request, self._context, self._architecture.word_size
        process, space = context.ids["pid"] & 0xFFFF_FFFF, 77
        frame = struct.unpack_from("=Q", self._registers(), REGISTER_OFFSETS["esp"])[0]
        frame = frame - (word if request.placement.is_return else 0) & self._architecture.word_mask
        probe = _PROBE if request.probe is not None else _PROBE & _PROBES // 2 - 1
        identity = struct.pack("=QQII", space, frame, probe, process)
        entries.discard(key := identity + bytes(8))
        spaces[struct.pack("=I", process)] = struct.pack("=Q", space)
        if context.entry is not None:
            values = [
                context.entry_register(index) & self._architecture.word_mask
                for _, index, _ in self._kept_entry.registers
            ]
            counted = [context.entry_counter(number) for number in self._kept_entry.counters]
            values += [COUNTER_UNREAD & (1 << 64) - 1 if count is None else count for count in counted]
            entries[key] = identity + struct.pack(f"=QQ{len(values)}Q", 0, context.entry_time() or 1, *values)

    def _thread_variables(self) -> tuple[HashMap, list[int]]:
        threads = self._maps[MapName.THREAD_VARIABLES]
        return threads, self._context.thread_variables()

    def _thread_key(self) -> bytes:
        ids = self._context.ids
        return struct.pack("=Q", ids["tid"] & 0xFFFF_FFFF or (ids["cpu"] + 1 << 32) & 0xFFFF_FFFF_FFFF_FFFF)

    def _change_table(self, body: bytes, *, is_removal: bool) -> None:
        """
        Apply a TALLY or UNTALLY entry of the ring buffer to its keyed table, as the reader of the ring does.

        Stacks in keys are already complete.
        """
        assert self._tables is not None
        number, _, value = TALLY.unpack_from(body)
        table = self._image.tables[number]
        store = self._tables.stores[number] if number in self._tables.stores else self._tables._maps[number]
        key, kept = body[TALLY.size :][: table.key_size], body[TALLY.size + table.key_size :]
        if is_removal:
            store.delete(key)
        elif kept:
            store.keep(key, kept)
        else:
            store.tally(key, value)

    def _entries(self) -> list[tuple[Entry, int, bytes]]:
        """Consume all entries of the ring buffer; return kind, thread id and body of each."""
        ring = self._maps[MapName.RING]
        entries = []
        for entry in ring.drain():
            word, tid = ENTRY_HEAD.unpack_from(entry)
            if word >> 24 in (Entry.TALLY, Entry.UNTALLY):
                self._change_table(entry[ENTRY_HEAD.size :], is_removal=word >> 24 == Entry.UNTALLY)
                continue
            assert word & 0xFF_FFFF == _PROBE
            entries.append((Entry(word >> 24), tid, entry[ENTRY_HEAD.size :]))
        return entries

    def _outcome(self, words: memoryview, point: Point) -> tuple[Outcome, FinalState] | None:
        def field(which: int) -> int:
            value: int = words[which // 8]
            return value

        entries = self._entries()
        assert self.lowered is not None
        is_small = all(reference.map is not MapName.SCRATCH for reference in self.lowered.assembled.maps)
        ending, unhandled = field(Field.ENDING), field(Field.UNHANDLED)
        if is_small:  # nothing is left of it, and it cannot end in other ways
            ending = EXIT if entries else ABORT
            unhandled = self.count(ProbeField.UNHANDLED)
        if ending == _NOT_RUN:
            assert not entries
            return None
        log, trace, major, minor, header = b"", b"", point.major, point.minor, None
        for kind, _, body in entries:
            if kind not in (Entry.RECORD, Entry.TRACE):
                continue
            record = decode_record(_with_short_name(body))
            if record.is_stack_trace:
                assert header is not None
                assert record == header._replace(major=0, minor=0, data=record.data, is_stack_trace=True, is_cut=False)
                trace = record.data
            else:
                header = record
                assert record.major is not None
                assert record.minor is not None
                log, major, minor = record.data, record.major, record.minor
        cells = tuple(words[CELLS // 8 : CELLS // 8 + RPN_STACK_CELLS])
        state = FinalState(cells, field(Field.TSP), tuple(entries), header)
        kinds = [kind for kind, _, _ in entries]
        if ending == ABORT:
            assert set(kinds) <= {Entry.ENDED}
            return Outcome(Ending.ABORT, b"", b"", major, minor), state
        assert kinds[0] is Entry.RECORD
        code = ending - EXIT_WITH if ending >= EXIT_WITH else 0
        how = {REMOVE_PROBE: Ending.REMOVE, SKIP: Ending.SKIP}.get(ending, Ending.EXIT)
        value = field(Field.VALUE) if how is Ending.SKIP else 0
        assert Entry.ENDED in kinds or not (code in (1, 3) or how is Ending.REMOVE)
        assert header is not None
        return Outcome(how, log, trace, major, minor, code, unhandled, value, header.is_cut), state


_NOT_RUN = 0xFFFF_FFFF
_LEFT_BEHIND = b"\xa5"
"""The byte that fills the state before a hit, as earlier hits leave values in it; no handler may read it."""


class Stage:
    """A back end of comparisons with the interpreter: eBPF, in a context that is completely simulated."""

    process = "self"
    """The name in /proc of the process that has the memory."""
    runner: Callable[..., EbpfRunner] = EbpfRunner

    def offered(self) -> Abilities:
        """Return the abilities with which handlers are compiled."""
        return abilities()

    def arrange(self, context: FakeContext, request: Request) -> None:
        """Copy into a simulated context the values that cannot be simulated here; there are none."""


def _with_short_name(data: bytes) -> bytes:
    """Return a record whose process name, ``NAME_SIZE`` bytes in the ring buffer, ends at its first zero byte."""
    flags = Item(int.from_bytes(data[:4], "little"))
    if Item.PROCESS_NAME not in flags:
        return data
    wide = 8 if Item.WIDE in flags else 4
    sizes = {Item.IP: wide, Item.SP: wide, Item.TIME: 8}
    at = 4
    for item in (Item.MAJOR, Item.MINOR, Item.CPU, Item.PID, Item.UID, Item.CS, Item.IP, Item.SS, Item.SP, Item.TIME):
        at += sizes.get(item, 4) if item in flags else 0
    name = data[at : at + NAME_SIZE].partition(b"\0")[0][:PROCESS_NAME_MAX] + b"\0"
    return data[:at] + name + data[at + NAME_SIZE :]


def obstacle() -> str | None:
    """Return the reason why this user cannot run BPF programs, for a skip; None if it is possible."""
    try:
        with EbpfRunner(CodeImage(b"\x0d", 8, "little", (0,), {}, (), {}), architecture("x86_64"), FakeContext()) as it:
            it.run(0, Point())
    except OSError as error:
        return f"the kernel runs no BPF programs for this user: {error.strerror}"
    return None
