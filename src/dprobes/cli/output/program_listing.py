"""The listing of a compiled program for ``show``: the contents of the file, independent of this machine."""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

import click

from dprobes.arch import architecture, go_architecture
from dprobes.bpf.bpf_disassembler import disassemble
from dprobes.bpf.bpf_instructions import decode as decode_insns
from dprobes.bpf.map_layouts import MapName
from dprobes.escapes import escaped
from dprobes.formatters.templates.template_collection import Templates
from dprobes.resolve.probepoints import Space, space_of
from dprobes.rpn import control_flow
from dprobes.rpn.instruction_encoding import closed, decode_one, encode
from dprobes.rpn.instruction_set import OperandKind, rows_by_syntax
from dprobes.rpn.program_needs import writing_instructions
from dprobes.rpn.program_text import print_header, print_instruction

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.arch import Architecture
    from dprobes.ppdf.ppdf_model import EbpfCode, Ppdf
    from dprobes.rpn.instruction_encoding import CodeImage
    from dprobes.rpn.rpn_program import Code, Program
    from dprobes.target.carried_symbols import CarriedBuild
    from dprobes.target.kernel.kernel_symbols import CarriedKernel

__all__ = ["Disassembly", "ppdf_listing"]

# The disassembled code of a program, for ``show`` and ``query --extended``.


def _encoded(program: Program, target: Architecture) -> CodeImage:
    """
    Return the encoded code of a program for ``target``, for listings.

    The program may be for a Go module, whose functions have more argument registers.
    """
    try:
        return encode(program, target)
    except KeyError:
        return encode(program, go_architecture())


class Disassembly:
    """
    Listing of a program's code as encoded for a processor. ``image`` is its encoding, if that already exists.

    Each instruction has its byte offset and the depth of the RPN stack before it, which is '?' if it depends on the
    run.
    """

    def __init__(self, program: Program, target: Architecture, image: CodeImage | None = None) -> None:
        self._program = program
        self._target = target
        self.image = image if image is not None else _encoded(program, target)
        self._offsets = [offset for offset, _ in self.image.instructions]
        self._starts = sorted((*self.image.handlers, *self.image.procedures.values(), len(self.image.data)))
        self._gains = control_flow.procedure_gains(program, target)

    def handler(self, number: int) -> Iterator[str]:
        """Iterate over the lines of the handler of the definition with index ``number``."""
        code = self._program.definitions[number].handler
        whole, tables = closed(code, rows_by_syntax()["exit"]), self._program.tables
        depths = control_flow.depths(whole, self._target, self._gains, tables=tables)[0]
        return self._lines(code, self.image.handlers[number], depths)

    def procedures(self) -> Iterator[str]:
        """Iterate over the lines of all procedures."""
        for procedure in self._program.procedures:
            yield ""
            yield f"proc {procedure.name}"
            yield from self._lines(procedure.code, self.image.procedures[procedure.name], {})
            yield "endproc"

    def _lines(self, code: Code, start: int, depths: dict[int, int]) -> Iterator[str]:
        """
        Iterate over lines for the instructions from byte offset ``start`` on, including the added ``exit`` or ``ret``.

        ``depths`` maps the index of an instruction to the depth of the RPN stack before it.
        """
        image = self.image
        first = bisect_left(self._offsets, start)
        after = bisect_left(self._offsets, self._starts[bisect_right(self._starts, start)])
        for index, (offset, instruction) in enumerate(image.instructions[first:after]):
            for label in image.labels.get(offset, ()):
                yield f"{label}:"
            depth = depths.get(index, control_flow.UNKNOWN)
            shown = "?" if depth >= control_flow.UNKNOWN else str(depth)
            line = f"  {offset:04x}  {shown:>4}  {print_instruction(instruction)}"
            if index >= len(code.instructions):
                line += "  // added"
            elif instruction.row.operand_kind in (OperandKind.LABEL, OperandKind.PROCEDURE):
                target = decode_one(image.data, offset, image.word_size, image.byte_order).operand
                line += f"  // {target:04x}"
            yield line


def ppdf_listing(ppdf: Ppdf, machine: str | None, *, as_bpf: bool) -> Iterator[str]:
    """Iterate over the lines of a listing, by default for the first processor that the program is encoded for."""
    machine = machine or ppdf.machines[0]
    if machine not in ppdf.machines:
        raise click.UsageError(f"the program is compiled for {' and '.join(ppdf.machines)}, not for {machine}")
    return _all_lines(ppdf, machine, as_bpf=as_bpf)


def _all_lines(ppdf: Ppdf, machine: str, *, as_bpf: bool) -> Iterator[str]:
    members = ppdf.members
    for number, each in enumerate(members, 1):
        if len(members) > 1:
            yield from () if number == 1 else ("",)
            yield f"// program {number} of {len(members)}"
        if machine not in each.machines:
            yield f"// not compiled for {machine}"
            continue
        yield from _ebpf_lines(each, machine) if as_bpf else _lines(each, machine)
    if ppdf.blocks is not None and not as_bpf:
        yield ""
        for block in ppdf.blocks.blocks:
            span = block.block.span
            yield f"// a block of the tool: {block.block.written}, from {span.file.name}:{span.line}"


def _lines(ppdf: Ppdf, machine: str) -> Iterator[str]:
    program, target = ppdf.program, architecture(machine)
    code = Disassembly(program, target)
    yield from print_header(program)
    yield from _remarks(ppdf)
    for build in ppdf.builds:
        yield from _build(build)
    for kernel in ppdf.kernels:
        yield from _kernel(kernel)
    yield from _templates(ppdf)
    yield f"// {machine}, {target.word_size}-byte words, code: {len(code.image.data)} bytes"
    for number, definition in enumerate(program.definitions):
        yield ""
        yield from print_header(definition)
        for build in ppdf.builds:
            yield from _places(build, number)
        for kernel in ppdf.kernels:
            yield from _kernel_places(kernel, number)
        yield from code.handler(number)
    yield from code.procedures()


def _remarks(ppdf: Ppdf) -> Iterator[str]:
    yield f"// compiled by {ppdf.tool or 'an unknown tool'} for {', '.join(ppdf.machines)}"
    for instruction in writing_instructions(ppdf.program):
        place = f" in {instruction.span}" if instruction.span is not None else ""
        yield f"// needs --allow-write: '{instruction}'{place}"
    if ppdf.needs_write and not writing_instructions(ppdf.program):
        yield "// needs --allow-write: an extension that it calls writes to the target"
    if not ppdf.builds and space_of(ppdf.program) is Space.KERNEL:
        yield from () if ppdf.kernels else ("// for any build of the kernel: its places are found by name",)
    elif not ppdf.builds:
        yield "// uses no symbols or types of any module"


def _templates(ppdf: Ppdf) -> Iterator[str]:
    for name, data in ppdf.templates.items():
        yield f"// template file '{name}': {len(data)} bytes"
    templates = Templates.from_files(ppdf.templates)
    for template in templates.all():
        desc = f": {escaped(template.desc)}" if template.desc else ""
        yield f"//   template {template.major},{template.minor}{desc}"
    for line in templates.diagnostics.render().splitlines():
        yield f"// {line}"


def _build(build: CarriedBuild) -> Iterator[str]:
    yield f"// build {build.identity} of {build.machine}, from '{build.path}'"
    for symbol in build.symbols:
        yield f"//   {symbol.address:#x} {symbol.size:#x} {symbol.kind} {symbol.binding} {symbol.name}"


def _places(build: CarriedBuild, number: int) -> Iterator[str]:
    for place in build.places:
        if place.definition == number:
            what = "is left at" if place.is_exit else "is at"
            where = f"{place.where} {what} file offset {place.offset:#x}"
            yield f"// build {build.identity[:12]}: {where}: {place.raw.hex(' ')}"


def _kernel(kernel: CarriedKernel) -> Iterator[str]:
    what = f"module '{kernel.module}'" if kernel.module else "kernel"
    yield f"// build {kernel.identity} of the {what}, from '{kernel.path}'"
    for area in kernel.areas:
        yield f"//   {area.address:#x} {area.size:#x} area {area.name}"
    for symbol in kernel.symbols:
        yield f"//   {symbol.address:#x} {symbol.letter} {symbol.name}"


def _kernel_places(kernel: CarriedKernel, number: int) -> Iterator[str]:
    for place in kernel.places:
        if place.definition == number:
            where = f"{place.where} is at {place.address:#x}"
            yield f"// build {kernel.identity[:12]}: {where}: {place.raw.hex(' ') or 'not read'}"


def _ebpf_lines(ppdf: Ppdf, machine: str) -> Iterator[str]:
    program, target = ppdf.program, architecture(machine)
    image = encode(program, target)
    yield from print_header(program)
    yield f"// {machine}, {target.word_size}-byte words; as compiled by {ppdf.tool or 'an unknown tool'}"
    yield "// This code is for reading: each machine compiles the code that it runs."
    for number, definition in enumerate(program.definitions):
        yield ""
        yield from print_header(definition)
        found = [code for code in ppdf.ebpf if (code.machine, code.definition) == (machine, number)]
        if not found:
            yield "// no eBPF is in the file"
        for code in found:
            yield from _ebpf(code, image)


def _ebpf(code: EbpfCode, image: CodeImage) -> Iterator[str]:
    if code.problem:
        yield f"// with {code.loops}: not compiled: {code.problem}"
        return
    instructions = list(decode_insns(code.code))
    sleeps = ", may sleep" if code.sleepable else ""
    yield f"// with {code.loops}: {len(instructions)} instructions, {code.scratch} bytes of scratch memory{sleeps}"
    strings = {offset: f"{offset:04x}  {print_instruction(i)}" for offset, i in image.instructions}
    origin = None
    for line in disassemble(instructions, dict(_maps(code))):
        if code.origins[line.index] != origin:
            origin = code.origins[line.index]
            yield f"; {strings.get(origin, 'around the handler' if origin < 0 else f'{origin:04x}  no instruction')}"
        yield f"{line.index:6}: {line.text}"


def _maps(code: EbpfCode) -> Iterator[tuple[int, MapName]]:
    """Yield index and name of the BPF maps with known names; others are shown by the numbers in the code."""
    for reference in code.maps:
        with contextlib.suppress(ValueError):
            yield reference.index, MapName(reference.name)
