"""What goes up the stack finds its way through displaced calls: exceptions, ``longjmp``, and ``backtrace()``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from iced_x86 import Decoder

from dprobes.target.probed_module import Module

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner

FUNCTIONS = ("inner", "middle", "outer")


def every_instruction(program: Path) -> str:
    """Return a program that counts the hits of all instructions of the functions, each with a minor code of its own."""
    module, data, places = Module.load(program), program.read_bytes(), []
    for symbol in module.symbols.functions():
        if symbol.name in FUNCTIONS:
            (segment,) = (s for s in module.elf.load_segments if s.vaddr <= symbol.address < s.vaddr + s.filesz)
            start = symbol.address - segment.vaddr + segment.offset
            code = Decoder(64, data[start : start + symbol.size], ip=symbol.address)
            places += [f"{symbol.name} + {instruction.ip - symbol.address}" for instruction in code]
    probes = (f"offset = {place}\nminor = {n}\nabort\n" for n, place in enumerate(places, 1))
    return f'name = "{program}"\nlogonfault = yes\n' + "".join(probes)


def test_all_instructions_have_jumps_and_functions_are_left_as_before(build: Builder, run: Runner) -> None:
    program = build("unwinds.cpp", "-O2", "-lstdc++")
    text, hits = every_instruction(program), {}
    for engine in ("ptrace", "inline"):
        result = run(text, ["--exit-status", "--", str(program)], ["--engine", engine])
        assert result.status == 0
        caught, jumped, frames, made, destroyed = result.stdout.split()
        assert (caught, jumped, made, destroyed) == ("1000", "1000", "2000", "2000")
        hits[engine] = {minor: counts.hits for minor, counts in result.counts.items()}, frames
    assert len(hits["inline"][0]) > 30
    assert hits["inline"] == hits["ptrace"]
    assert sum("inline" in counts.executed for counts in result.counts.values()) >= 0.9 * len(result.counts)
