"""The verb ``show``: a program as it will be inserted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dprobes.cli import console
from dprobes.cli.compile import Compiled, compile_program
from dprobes.cli.options import PROCESS_ID, PROGRAM_FILE, compile_options, program_options, symbols_option
from dprobes.cli.summary import left_out_lines, place_of
from dprobes.diagnostics import Severity
from dprobes.engines.watchpoints import ResolvedWatchpoint
from dprobes.rpn import cfg
from dprobes.rpn.decode import decode_one
from dprobes.rpn.encode import CodeImage, closed, encode
from dprobes.rpn.isa import OperandKind, rows_by_syntax
from dprobes.rpn.printer import print_header, print_instruction
from dprobes.target.arch import ARCHITECTURE_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from dprobes.engines.resolve import Probepoint
    from dprobes.rpn.program import Code

__all__ = ["command", "listing"]


@click.command("show")
@click.argument("file", type=PROGRAM_FILE)
@program_options
@symbols_option
@click.option("-p", "--pid", type=PROCESS_ID, help="Look for the module among the files that this process maps.")
@click.option("--arch", type=click.Choice(ARCHITECTURE_NAMES), help="Encode for this processor, not this machine's.")
def command(
    file: Path,
    defines: tuple[str, ...],
    includes: tuple[Path, ...],
    cpp: str | None,
    allow_write: bool,
    symbols: Path | None,
    pid: int | None,
    arch: str | None,
) -> int:
    """
    Print the probe program FILE as it will be inserted.

    For each probepoint its place in the module and the instruction there, then the handler: byte offsets in the encoded
    program, instructions, and the depth of the RPN stack before each ('?' where it depends on the run).
    """
    options = compile_options(defines, includes, cpp, allow_write=allow_write)
    compiled = compile_program(file, options, symbols=symbols, pid=pid, architecture_name=arch)
    if text := compiled.render(Severity.WARNING, Severity.NOTE):
        console.write(text)
    click.echo("\n".join(listing(compiled)))
    return 0


def listing(compiled: Compiled) -> Iterator[str]:
    """Iterate over the lines of a program's listing."""
    program, resolved = compiled.program, compiled.resolved
    image = resolved.image if resolved is not None else encode(program, compiled.architecture)
    yield from print_header(program)
    where = f"'{resolved.module.path}'" if resolved is not None else "not on this machine"
    if compiled.everywhere:
        where = "every process"
    yield f"// module: {where}, {compiled.architecture.name}, {compiled.architecture.word_size}-byte words"
    yield f"// code: {len(image.data)} bytes"
    probes: tuple[Probepoint, ...] = (
        (*resolved.probes, *resolved.watchpoints) if resolved is not None else compiled.everywhere
    )
    left_out = resolved.left_out if resolved is not None else ()
    gains = cfg.procedure_gains(program, compiled.architecture)
    for number, definition in enumerate(program.definitions):
        yield ""
        yield from print_header(definition)
        yield from _places([probe for probe in probes if probe.number == number], compiled.architecture.word_size)
        for line in left_out_lines([x for x in left_out if x.number == number], names=None):
            yield f"// {line}"
        handler = closed(definition.handler, rows_by_syntax()["exit"])
        depths = cfg.depths(handler, compiled.architecture, gains)[0]
        yield from _code(definition.handler, image, image.handlers[number], depths)
    for procedure in program.procedures:
        yield ""
        yield f"proc {procedure.name}"
        yield from _code(procedure.code, image, image.procedures[procedure.name], {})
        yield "endproc"


def _places(probes: Sequence[Probepoint], word_size: int) -> Iterator[str]:
    from dprobes.engines.ptrace.cost import execution_of

    if not probes:
        yield "// not resolved"
    for probe in probes:
        if isinstance(probe, ResolvedWatchpoint):
            size = f"{probe.length} byte{'s' if probe.length > 1 else ''}"
            yield f"// {probe.where}: {size} at address {probe.address:#x}, {probe.state.value}"
            continue
        instruction = probe.instruction
        place = f"file offset {probe.offset:#x}, address {instruction.address:#x}"
        yield f"// {place_of(probe)}: {place}, {probe.state.value}"
        if probe.exits is None:
            yield f"// {instruction.raw.hex(' ')}  {instruction.text}"
            yield f"// executed {execution_of(instruction.raw, word_size).value}"
        else:
            exits = ", ".join(f"{exit_.kind.value} at {exit_.offset:#x}" for exit_ in probe.exits.exits)
            yield f"// left by {exits or 'nothing'}"


def _code(code: Code, image: CodeImage, start: int, depths: dict[int, int]) -> Iterator[str]:
    """List the instructions that lie in the image from ``start`` on, the added ``exit`` or ``ret`` included."""
    first = next(n for n, (offset, _) in enumerate(image.instructions) if offset == start)
    following = [*image.handlers, *image.procedures.values(), len(image.data)]
    end = min(offset for offset in following if offset > start)
    for index, (offset, instruction) in enumerate(image.instructions[first:]):
        if offset >= end:
            break
        for label in image.labels.get(offset, ()):
            yield f"{label}:"
        depth = depths.get(index, cfg.UNKNOWN)
        shown = "?" if depth >= cfg.UNKNOWN else str(depth)
        line = f"  {offset:04x}  {shown:>4}  {print_instruction(instruction)}"
        if index >= len(code.instructions):
            line += "  // added"
        elif instruction.row.operand_kind in (OperandKind.LABEL, OperandKind.PROCEDURE):
            target = decode_one(image.data, offset, image.word_size, image.byte_order).operand
            line += f"  // {target:04x}"
        yield line
