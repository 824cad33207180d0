"""
Machine code of AArch64 as a back end of the tests, executed by an emulated processor.

Handlers do not depend on the registers of the processor, which they read from memory. So the programs and their context
are those of x86.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import TYPE_CHECKING, Self

import unicorn

from dprobes.bpf.bpf_instructions import Helper
from dprobes.bpf.lower.hosts.hit_thread import REGISTER_OFFSETS
from dprobes.bpf.map_layouts import MapName
from dprobes.native.a64.a64_assembler import Gpr
from dprobes.native.a64.a64_operations import A64Operations, gpr
from dprobes.native.ebpf_translator import handler_function
from dprobes.native.generated_code import Surroundings
from dprobes.native.runtime_routines import make_runtime
from dprobes.testing import PAGE
from support.a64_processor import A64Processor
from support.native_backend import NATIVE, NativeRunner, NativeStage, facts_page, process_facts, shapes_of

if TYPE_CHECKING:
    from dprobes.bpf.lower import Lowered
    from dprobes.engines.inline.shared_memory import SharedArray
    from dprobes.native.generated_code import ProcessFacts, Runtime
    from dprobes.native.routines.handler_ring import RingShape
    from support.native_backend import Shapes

__all__ = ["NATIVE", "A64Runner", "A64Stage"]


class A64Runner(NativeRunner):
    """A runner of handlers as machine code of AArch64."""

    def __enter__(self) -> Self:
        self._handlers: list[tuple[A64Processor, int]] = []
        return super().__enter__()

    def _load(self, lowered: Lowered, scratch: SharedArray) -> int:
        objects = self._map_objects(scratch)
        address, rings = self._room(), self._maps[MapName.RING].shape
        runtime = _runtime(address, process_facts(), rings, shapes_of(objects))
        places = {name: each.place for name, each in objects.items()}
        asking = A64Operations(runtime.code.end)
        routines = {**runtime.routines, **_write_questions(asking)}
        around = Surroundings(places, routines, runtime.map_routines, rings=rings)
        handler = handler_function(A64Operations(asking.here), lowered.assembled, around)
        processor = A64Processor([(self._region.own_address, self._region.size), (facts_page(), PAGE)])
        processor.put(address, runtime.code.code + asking.assemble() + handler.code)
        processor.catch(runtime.code.fixups)
        self._handlers.append((processor, handler.address))
        return len(self._handlers) - 1

    def _execute(self, program: int) -> None:
        processor, address = self._handlers[program]
        context = self._context
        block = ctypes.create_string_buffer(2 * PAGE)
        start = ctypes.addressof(block) + PAGE - 1 & -PAGE
        registers = self._registers()
        ctypes.memmove(start, registers, len(registers))
        processor.share(start, PAGE)
        for page, content in context._pages.items():
            processor.map(page * PAGE, PAGE)
            processor.write(page * PAGE, bytes(content))
            if page in context._read_only:
                processor.protect(page * PAGE, PAGE, unicorn.UC_PROT_READ)
        try:
            processor.call(address, start)
            for page, content in context._pages.items():
                content[:] = processor.read(page * PAGE, PAGE)
        finally:
            processor.unmap(start, PAGE)
            for page in context._pages:
                processor.unmap(page * PAGE, PAGE)
        for name, offset in REGISTER_OFFSETS.items():
            if self._architecture.register(name) is None or name in ("eip", "esp", "cs", "ss"):
                continue
            (value,) = struct.unpack_from("=Q", ctypes.string_at(start + offset, 8))
            context.set_value(name, value & self._architecture.word_mask)


@functools.lru_cache(64)
def _runtime(address: int, facts: ProcessFacts, rings: RingShape, shapes: Shapes) -> Runtime:
    return make_runtime(A64Operations(address), facts, rings, dict(shapes))


def _write_questions(asm: A64Operations) -> dict[Helper, int]:
    """
    Write AArch64 routines for the helpers that need a system call, and return their addresses.

    Handlers in other processes call neither: the facts of the process have the user id and the name.
    """
    user = asm.here
    asm.mov_number(Gpr.X8, 174)  # getuid
    asm.system_call()
    asm.mov(gpr(0), Gpr.X0)
    asm.ret()
    name = asm.here
    asm.mov(Gpr.X1, Gpr.X0)
    asm.mov_number(Gpr.X0, 16)  # PR_GET_NAME
    asm.mov_number(Gpr.X8, 167)  # prctl
    asm.system_call()
    asm.mov(gpr(0), Gpr.X0)
    asm.ret()
    return {Helper.GET_CURRENT_UID_GID: user, Helper.GET_CURRENT_COMM: name}


class A64Stage(NativeStage):
    """The back end "machine code of AArch64" of comparisons with the interpreter."""

    runner = A64Runner
