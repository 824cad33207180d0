"""Measure the processor time of a run that places jumps at thousands of instructions of one library."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from manyplaces import DIRECTORIES, mapper
from table import BenchmarkError, Measurement
from tracing import DPROBES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.target.probed_module import Module

__all__ = ["placing"]

LIBRARY = "libsqlite3.so.0"
COUNTS = (1, 1_000, 10_000)
ROUNDS = 3


def placing(directory: Path) -> list[Measurement]:
    """Return the rows about jumps at instructions that store to memory, from the start of dprobes to its end."""
    from dprobes.target.probed_module import Module

    found = next((path for name in DIRECTORIES if (path := Path(name) / LIBRARY).exists()), None)
    if found is None:
        return [Measurement(f"place jumps in {LIBRARY} (not installed)", None)]
    module = Module.load(found.resolve())
    places = list(_stores(module))
    rows = []
    for count in COUNTS:
        source = directory / "placing.rpn"
        source.write_text(_program(module, places[:: max(1, len(places) // count)][:count]))
        seconds = min(_run(source, found) for _ in range(ROUNDS))
        what = f"place {min(count, len(places))} jump{'s' * (count > 1)} in {LIBRARY}: processor time"
        rows.append(Measurement(what, seconds * 1e6))
    return rows


def _stores(module: Module) -> Iterator[int]:
    """Iterate over the file offsets of the instructions that store to memory, except on the stack."""
    from iced_x86 import Decoder, InstructionInfoFactory, OpAccess, OpKind, Register

    writing = (OpAccess.WRITE, OpAccess.READ_WRITE)
    elf, factory = module.elf, InstructionInfoFactory()
    for start in elf.frames.starts:
        extent = elf.frames.extent(elf, start)
        if extent is None:
            continue
        for each in Decoder(64, elf.read(start, extent[1] - start), ip=start):
            if each.op0_kind != OpKind.MEMORY or each.memory_base in (Register.RSP, Register.RIP):
                continue
            if any(memory.access in writing for memory in factory.info(each).used_memory()):
                yield module.file_offset(each.ip)


def _program(module: Module, places: Sequence[int]) -> str:
    """Return a program that counts the hits at places; the opcode confirms those outside of known functions."""
    probes = (f"offset = {place:#x}\nopcode = {module.elf.data[place]:#x}\ninc lv, 0\nabort\n" for place in places)
    return f'name = "{module.path}"\nvars = 1\n{"".join(probes)}'


def _run(source: Path, library: Path) -> float:
    """Return the seconds of processor time of dprobes and its processes, until the target has ended."""
    with mapper(library) as pid:
        command = [*DPROBES, "run", "--engine", "inline", "--overhead", "off", str(source), "-p", str(pid)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        messages = []
        for line in process.stderr:
            messages.append(line)
            if "active" in line:
                break
    messages += process.stderr.readlines()
    process.stderr.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise BenchmarkError(f"dprobes ended with status {process.returncode}: {''.join(messages)}")
    if any("a breakpoint instead" in line for line in messages):
        raise BenchmarkError(f"some places kept breakpoints: {messages[-1]}")
    return usage.ru_utime + usage.ru_stime
