"""The verb ``show``: probepoints and handlers of a program as they will be inserted, or the contents of a PPDF."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import click

from dprobes.api.compiled_program import is_compiled
from dprobes.arch import ARCHITECTURE_NAMES
from dprobes.cli import console
from dprobes.cli.console import Progress, print_lines
from dprobes.cli.option_values import compile_options, program_of
from dprobes.cli.output.program_listing import Disassembly
from dprobes.cli.output.run_summary import left_out_lines, place_of
from dprobes.cli.resolved_program import ResolvedProgram, compile_programs, load_program
from dprobes.cli.shared_options import PROCESS_ID, PROGRAM, program_options, symbols_option, text_option
from dprobes.diagnostics import Severity
from dprobes.resolve.probepoints import ProbeKind
from dprobes.rpn.program_text import print_header

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from dprobes.resolve.probepoints import Probepoint
    from dprobes.target.kernel.running_kernel import RunningKernel
    from dprobes.target.probed_module import Module

__all__ = ["json_lines", "listing", "show_command"]


@click.command("show")
@click.argument("file", type=PROGRAM, required=False)
@text_option("Show")
@program_options
@symbols_option
@click.option("-p", "--pid", type=PROCESS_ID, help="Search for the module among the files that this process maps.")
@click.option("--engine", metavar="NAME", help="Print how this engine handles each probepoint.")
@click.option("--bpf", "as_bpf", is_flag=True, help="Print the handlers as eBPF, as the ebpf engine compiles them.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each probepoint, one on each line.")
@click.option(
    "--arch", type=click.Choice(ARCHITECTURE_NAMES), help="Encode for this processor instead of this machine's."
)
def show_command(
    file: Path | None,
    text: str | None,
    defines: tuple[str, ...],
    includes: tuple[Path, ...],
    cpp: str | None,
    allow_write: bool,
    symbols: Path | None,
    pid: int | None,
    engine: str | None,
    as_bpf: bool,
    as_json: bool,
    arch: str | None,
) -> int:
    """
    Print the probe program FILE as it will be inserted.

    For each probepoint: its place in the module and the instruction there. Then the handler: byte offsets in the
    encoded program, instructions, and the depth of the RPN stack before each ('?' where it depends on the run).

    With --engine NAME: the kind of jump that probes each probepoint, or the reason for a breakpoint.

    With --bpf: the eBPF that the handlers are compiled to for this kernel, with the program's instructions in between.
    A jump shows its distance and the number of its target instruction.

    With --json: only the probepoints, one JSON object on each line.

    For a compiled program (dprobes build): everything that the file contains, and nothing about this machine.
    """
    program = program_of(file, text)
    if engine is not None:
        from dprobes.engines.engine_registry import rows

        if engine not in (known := [row.name for row in rows() if row.probe_notes is not None]):
            raise click.BadParameter(
                f"'{engine}' has no such notes; {' and '.join(known)} does", None, None, "--engine"
            )
    options = compile_options(defines, includes, cpp, allow_write=allow_write)
    if file is not None and is_compiled(file):
        if as_json:
            raise click.UsageError("--json shows the probepoints of a program here: a compiled one has none yet")
        from dprobes.cli.output.program_listing import ppdf_listing

        loaded = load_program(file, options, symbols=symbols)
        assert loaded.ppdf is not None
        print_lines(ppdf_listing(loaded.ppdf, arch, as_bpf=as_bpf))
        return 0
    with Progress("looking for the probepoints"):
        found = compile_programs(program, options, symbols=symbols, pid=pid, architecture_name=arch)
    if said := found[0].render(Severity.WARNING, Severity.NOTE):
        console.write(said)
    if as_json:
        print_lines([line for compiled in found for line in json_lines(compiled)])
        return 0
    for number, compiled in enumerate(found):
        if number:
            print_lines([""])
        if as_bpf:
            from dprobes.engines.engine_registry import code_listing

            print_lines(code_listing(compiled))
        else:
            print_lines(listing(compiled, engine))
    return 0


def listing(compiled: ResolvedProgram, engine: str | None = None) -> Iterator[str]:
    """Iterate over the lines of a program's listing, with the engine's method for each probepoint."""
    program, resolved = compiled.program, compiled.resolved or compiled.kernel
    code = Disassembly(program, compiled.architecture, resolved.image if resolved is not None else None)
    yield from print_header(program)
    where = f"'{compiled.resolved.module.path}'" if compiled.resolved is not None else "not on this machine"
    if compiled.kernel is not None:
        name = compiled.kernel.module.name
        where = f"'{name}' of the running kernel" if name else "the running kernel"
        if (unloaded := compiled.kernel.module.kernel.file) is not None:
            where = f"'{name}', which is not loaded ('{unloaded}')"
    if compiled.everywhere:
        where = "every process"
    yield f"// module: {where}, {compiled.architecture.name}, {compiled.architecture.word_size}-byte words"
    yield f"// code: {len(code.image.data)} bytes"
    if compiled.architecture.convention == "Go":
        yield "// Go: arg0 to arg8 are rax, rbx, rcx, rdi, rsi, r8, r9, r10, r11 (ABIInternal)"
    probes = resolved.probepoints if resolved is not None else compiled.everywhere
    left_out = resolved.left_out if resolved is not None else ()
    notes = _notes(compiled, engine)
    for number, definition in enumerate(program.definitions):
        yield ""
        yield from print_header(definition)
        module = compiled.resolved.module if compiled.resolved is not None else None
        mine = [probe for probe in probes if probe.number == number]
        yield from _places(mine, module, notes, compiled.kernel.module.kernel if compiled.kernel is not None else None)
        if compiled.resolved is not None and number in compiled.resolved.of_c:
            yield "// a function of C: arg0 to arg5 are rdi, rsi, rdx, rcx, r8, r9"
        for line in left_out_lines([x for x in left_out if x.number == number], names=None):
            yield f"// {line}"
        yield from code.handler(number)
    yield from code.procedures()


def json_lines(compiled: ResolvedProgram) -> Iterator[str]:
    """Iterate over the probepoints of a program as JSON; offsets and addresses are numbers."""
    import json

    resolved = compiled.resolved or compiled.kernel
    for probe in resolved.probepoints if resolved is not None else compiled.everywhere:
        fields: dict[str, str | int] = {
            "major": compiled.program.major,
            "minor": probe.definition.minor,
            "module": probe.path,
            "place": place_of(probe),
            "kind": probe.kind.value,
            "state": probe.state.value,
        }
        if probe.is_in_code:
            fields |= {"offset": probe.offset, "address": probe.instruction.address, "opcode": probe.instruction.raw[0],
                       "instruction": probe.instruction.text}  # fmt: skip
        elif probe.kind is ProbeKind.WATCHPOINT:
            fields |= {"address": probe.memory.address, "length": probe.memory.length}
        yield json.dumps(fields, ensure_ascii=False)


def _notes(compiled: ResolvedProgram, engine: str | None) -> dict[int, str]:
    """
    Return the engine's remark about the execution of each probepoint, by the ``id`` of the probepoint.

    An empty mapping if ``engine`` is None.
    """
    from dprobes.engines.engine_registry import rows

    resolved = compiled.resolved
    if resolved is None or engine is None:
        return {}
    (row,) = (row for row in rows() if row.name == engine)
    found = row.notes_on_probes(compiled.program, resolved)
    return {id(resolved.probepoints[number]): f"// {engine}: {note}" for number, note in found.items()}


def _places(
    probes: Sequence[Probepoint], module: Module | None, notes: dict[int, str], kernel: RunningKernel | None
) -> Iterator[str]:
    from dprobes.engines.engine_registry import rows

    if not probes:
        yield "// not resolved"
    remarks: dict[int, list[str]] = {}
    if module is not None:
        entries = [probe for probe in probes if probe.kind is ProbeKind.BREAKPOINT]
        for row in rows():
            for entry, note in zip(entries, row.notes_on(module, [p.instruction for p in entries]), strict=False):
                remarks.setdefault(entry.offset, []).append(f"// {row.name}: {note.text}")
    for probe in probes:
        match probe.kind:
            case ProbeKind.BREAKPOINT:
                yield _code_line(probe, kernel)
                yield f"// {probe.instruction.raw.hex(' ')}  {probe.instruction.text}"
                if probe.code.usdt is not None:
                    from dprobes.cli.output.module_listing import described_site

                    yield from (f"// {line}" for line in described_site(probe.code.usdt))
                yield from remarks.get(probe.offset, ())
                yield from filter(None, [notes.get(id(probe))])
            case ProbeKind.RETURN:
                yield _code_line(probe, kernel)
                exits = ", ".join(f"{exit_.kind.value} at {exit_.offset:#x}" for exit_ in probe.code.exits.exits)
                yield f"// left by {exits or 'nothing'}"
                yield from filter(None, [notes.get(id(probe))])
            case ProbeKind.WATCHPOINT:
                length = probe.memory.length
                size = f"{length} byte{'s' if length > 1 else ''}"
                where = "" if kernel is not None and not kernel.is_loaded else f" at address {probe.memory.address:#x}"
                yield f"// {probe.where}: {size}{where}, {probe.state.value}"
            case ProbeKind.SAMPLER:
                yield f"// {probe.where} on each CPU, {probe.state.value}"
            case ProbeKind.TRACEPOINT:
                yield f"// {place_of(probe)}, by {probe.traced.source.value}, {probe.state.value}"
            case kind:
                assert_never(kind)


def _code_line(probe: Probepoint, kernel: RunningKernel | None) -> str:
    if kernel is not None and not kernel.is_loaded:
        return f"// {place_of(probe)}: {kernel.offset_text(probe.offset)}, {probe.state.value}"
    place = f"file offset {probe.offset:#x}, address {probe.instruction.address:#x}"
    return f"// {place_of(probe)}: {place}, {probe.state.value}"
