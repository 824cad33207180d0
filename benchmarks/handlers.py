"""
Measure what a handler costs by itself: the Python of a hit, without the system calls of one.

The interpreter stands beside the translation as its peer.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

from dprobes.arch import architecture
from dprobes.diagnostics import Diagnostics
from dprobes.engines.hits.probe_hits import RecordBuilder
from dprobes.engines.ptrace.shared_counters import SharedCounters
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.handler_context import ThreadContext
from dprobes.engines.ptrace.tracer.tracer_programs import InsertedProgram, Reach
from dprobes.engines.ptrace.tracer.tracer_state import Thread, ThreadState
from dprobes.platform.linux import process_calls, ptrace_calls
from dprobes.record.log_record import Item
from dprobes.rpn.compilation_passes import CompileOptions, check_program, parse_source
from dprobes.rpn.instruction_encoding import encode
from dprobes.source_text import SourceFile
from dprobes.vm import Interpreter, Point
from dprobes.vm.translate import Translator

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Cost", "handler_costs"]

ROUNDS = 15
HITS = 1000

HANDLERS = {
    "1 word logged": "push r, arg0; log 1; exit",
    "10 instructions, a string": """
        push r, arg0; push 8; add; push mem, u64; log 1
        inc lv, 0; push 64; push r, arg1; log str; exit""",
}


Cost = tuple[str, float, str, float | None]
"""What was measured, its microseconds, and those of a peer: a row of the table."""


class _Memory:
    """Stand in for the memory of another process, of which reading is a system call."""

    def read(self, pid: int, address: int, size: int) -> bytes:  # noqa: ARG002 - as in RemoteMemory
        return b"a file name of 32 bytes, or more\0"[:size].ljust(size, b"\0")


def handler_costs() -> list[Cost]:
    """Measure all handlers."""
    return [cost for what, text in HANDLERS.items() for cost in _costs(what, text)]


def _program() -> InsertedProgram:
    return InsertedProgram(
        0, 0, Reach(), (), {}, SharedCounters.new(1, 0), [], {}, RecordBuilder(0), core_directory="."
    )


def _costs(what: str, text: str) -> list[Cost]:
    target = architecture("x86_64")
    diagnostics = Diagnostics()
    program = parse_source(SourceFile("x", f"name = x; vars = 1; offset = 0; {text}"), diagnostics, CompileOptions())
    check_program(program, target, diagnostics, CompileOptions())
    image = encode(program, target)
    point = Point.of(program, program.definitions[0], 0)
    start = image.handlers[0]

    registers = ptrace_calls.Registers()
    context = ThreadContext()
    context.use(_program())
    context.memory = cast("process_calls.RemoteMemory", _Memory())
    context.select(Thread(1, 1, AddressSpace(-1, 8, has_shadow_stack=False), ThreadState.STOPPED), registers)
    translator, interpreter = Translator(image, target), Interpreter(image, target)
    outcome = translator.run(start, point, context)
    builder = RecordBuilder(int(Item.PID))

    def record() -> None:
        builder.record(builder.header(context, 8), outcome)

    translated = _microseconds(lambda: translator.run(start, point, context))
    interpreted = _microseconds(lambda: interpreter.run(start, point, context))
    first = _microseconds(lambda: Translator(image, target).run(start, point, context), HITS // 50)
    return [
        (f"handler alone: {what}", translated, "interpreter", interpreted),
        ("its record, with the process id", _microseconds(record), "", None),
        ("its translation, and the first hit", first, "", None),
    ]


def _microseconds(action: Callable[[], object], times: int = HITS) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(times):
            action()
        best = min(best, time.perf_counter() - begin)
    return best / times * 1e6


if __name__ == "__main__":
    for cost in handler_costs():
        print(cost)
