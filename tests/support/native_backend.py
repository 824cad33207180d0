"""
Machine code of x86-64 as a back end of the tests, executed in this process.

The memory of ``FakeContext`` is mapped at the same addresses, as for eBPF. A signal handler lets faults continue at
their fix-ups.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import TYPE_CHECKING, Any, Self

from dprobes.bpf.bpf_instructions import Helper
from dprobes.bpf.lower import Abilities, LoopForm
from dprobes.bpf.lower.hosts.hit_thread import REGISTER_OFFSETS
from dprobes.bpf.map_layouts import NOTE_SIZE, MapName
from dprobes.engines.inline.entry_reader import SharedRings
from dprobes.engines.inline.shared_memory import Region, SharedArray, SharedHash
from dprobes.engines.inline.shared_state import SharedTables
from dprobes.native.ebpf_translator import handler_function
from dprobes.native.generated_code import ProcessFacts, Surroundings
from dprobes.native.routines.handler_ring import RingShape
from dprobes.native.routines.shared_hash_table import TableShape
from dprobes.native.runtime_routines import make_runtime
from dprobes.native.x86.x86_assembler import Gpr, X86Assembler
from dprobes.native.x86.x86_operations import X86Operations
from dprobes.testing import PAGE
from support.ebpf_backend import EbpfRunner, Stage
from support.ebpf_world import memory_of
from support.machine_code import FaultHandler, Pages, call_stub, function_at, give_back, handle_faults, place, take_room

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.bpf.lower import Lowered
    from dprobes.engines.keyed_table_maps import TableMaps
    from dprobes.native.generated_code import Runtime
    from dprobes.rpn.instruction_encoding import CodeImage

    Shapes = tuple[tuple[MapName, TableShape], ...]

__all__ = ["NATIVE", "NativeRunner", "NativeStage", "facts_page", "process_facts", "shapes_of"]

NATIVE = Abilities(
    LoopForm.MAY_GOTO,
    sleepable=False,
    writes_memory=True,
    writes_registers=True,
    overrides_returns=True,
    small_states=True,
    verified=False,
    polled=True,
)
"""The abilities with which handlers are compiled; skipping a function is simulated (``ebpf_world.host_of``)."""

_REGION_SIZE = 16 << 20
_ROOM = 1 << 20
"""Bytes of address space for the code of one program: its routines, then a handler."""


class NativeRunner(EbpfRunner):
    """A runner of handlers as machine code of x86-64."""

    def __enter__(self) -> Self:
        self._region = Region(_REGION_SIZE)
        self._region.place = self._region.own_address
        self._shapes: dict[int, TableShape] = {}
        self._functions: list[tuple[Any, FaultHandler]] = []
        self._rooms: list[int] = []
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        for _, faults in self._functions:
            faults.close()
        for room in reversed(self._rooms):
            give_back(room, _ROOM)
        self._region.close()

    def _room(self) -> int:
        """Return the address of reserved memory for a handler's code; earlier runners may have used it."""
        self._rooms.append(take_room(_ROOM))
        return self._rooms[-1]

    def abilities(self, loops: LoopForm | None, *, sleepable: bool) -> Abilities:
        return NATIVE

    def shared_tables(self, image: CodeImage) -> frozenset[int]:
        return frozenset(range(len(image.tables)))

    def array(self, size: int) -> Any:
        return SharedArray(self._region, size)

    def hash(self, key_size: int, value_size: int, entries: int) -> Any:
        return SharedHash(self._region, TableShape(key_size, value_size, entries))

    def ring(self, size: int) -> Any:
        return SharedRings(self._region, RingShape(2, size))

    def notes(self, entries: int) -> Any:
        return SharedHash(self._region, TableShape(4, NOTE_SIZE, entries, forgets=True))

    def table_maps(self) -> TableMaps[Any, Any]:
        return SharedTables(self._image.tables, self._region)

    def _map_objects(self, scratch: SharedArray) -> Mapping[MapName, Any]:
        tables: Mapping[MapName, Any] = {} if self._tables is None else self._tables.maps
        return {**self._maps, **tables, MapName.SCRATCH: scratch}

    def _load(self, lowered: Lowered, scratch: SharedArray) -> int:
        objects = self._map_objects(scratch)
        # The code is made for the place where it will be mapped, which is found first.
        address, rings = self._room(), self._maps[MapName.RING]
        runtime = _runtime(address, process_facts(), rings.shape, shapes_of(objects))
        asking = X86Assembler(runtime.code.end)
        routines = {**runtime.routines, **_write_questions(asking)}
        around = Surroundings({name: each.place for name, each in objects.items()}, routines,
                              runtime.map_routines, rings=rings.shape)  # fmt: skip
        handler = handler_function(X86Operations(asking.here), lowered.assembled, around)
        stub = call_stub(handler.end, handler.address)
        place(address, runtime.code.code + asking.assemble() + handler.code + stub, _ROOM)
        self._functions.append((function_at(handler.end), handle_faults(runtime.code.fixups)))
        return len(self._functions) - 1

    def _unload(self, program: int) -> None:
        pass

    def _execute(self, program: int) -> None:
        function, faults = self._functions[program]
        registers = ctypes.create_string_buffer(self._registers(), len(self._registers()))
        context = self._context
        with memory_of(context):
            with faults:
                function(ctypes.addressof(registers))
            for page in context._pages:
                context._pages[page][:] = ctypes.string_at(page * PAGE, PAGE)
        for name, offset in REGISTER_OFFSETS.items():
            if self._architecture.register(name) is None or name in ("eip", "esp", "cs", "ss"):
                continue
            (value,) = struct.unpack_from("=Q", registers, offset)
            context.set_value(name, value & self._architecture.word_mask)


@functools.lru_cache(64)
def _runtime(address: int, facts: ProcessFacts, rings: RingShape, shapes: Shapes) -> Runtime:
    return make_runtime(X86Operations(address), facts, rings, dict(shapes))


def shapes_of(objects: Mapping[MapName, Any]) -> Shapes:
    """Return the names and shapes of the hash tables among maps."""
    return tuple((name, each.shape) for name, each in objects.items() if isinstance(each, SharedHash))


@functools.cache
def facts_page() -> int:
    """Return the address of a page for the facts of a process; it is empty, so that handlers make system calls."""
    return Pages(1).start


def process_facts() -> ProcessFacts:
    """Return the addresses of the facts in that page."""
    return ProcessFacts(facts_page(), facts_page() + 64)


def _write_questions(asm: X86Assembler) -> dict[Helper, int]:
    """
    Write x86-64 routines for the helpers that need a system call, and return their addresses.

    Handlers in other processes call neither: the facts of the process have the user id and the name.
    """
    user = asm.here
    asm.mov_number(Gpr.RAX, 102)  # getuid
    asm.syscall()
    asm.ret()
    name = asm.here
    asm.mov(Gpr.RSI, Gpr.RDI)
    asm.mov_number(Gpr.RDI, 16)  # PR_GET_NAME
    asm.mov_number(Gpr.RAX, 157)  # prctl
    asm.syscall()
    asm.ret()
    return {Helper.GET_CURRENT_UID_GID: user, Helper.GET_CURRENT_COMM: name}


class NativeStage(Stage):
    """The back end "machine code of x86-64" of comparisons with the interpreter."""

    runner = NativeRunner

    def offered(self) -> Abilities:
        return NATIVE
