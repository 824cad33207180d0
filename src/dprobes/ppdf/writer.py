"""A compiled program to the bytes of a PPDF."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.arch import architecture
from dprobes.errors import FormatError
from dprobes.ppdf.builds import write_builds
from dprobes.ppdf.container import pack
from dprobes.ppdf.definitions import write_program
from dprobes.ppdf.ebpfcodes import write_ebpf
from dprobes.ppdf.fieldcodec import NO_TEXT, Strings, Writer
from dprobes.ppdf.images import MACHINES, notes_of, write_images
from dprobes.ppdf.kernels import write_kernels
from dprobes.ppdf.sources import Spans
from dprobes.rpn import isa
from dprobes.rpn.encoder import encode as encode_code

if TYPE_CHECKING:
    from dprobes.ppdf.model import Ppdf

__all__ = ["IS_JOINED", "NEEDS_WRITE", "STRING_MAX", "encode"]

NEEDS_WRITE = 1
"""The flag of a program that changes or stops its target."""

IS_JOINED = 2
"""The flag of a program that is less without its companions and blocks: who does not know these refuses the file."""

STRING_MAX = 1 << 20
"""How many bytes a string has at most."""


def encode(ppdf: Ppdf) -> bytes:
    """
    Return the bytes of a PPDF.

    The same value gives the same bytes. Raise ``FormatError`` for what the format cannot hold.
    """
    program, strings = ppdf.program, Strings()
    spans = Spans(strings)
    machines = [name for name in MACHINES if name in ppdf.machines]
    if not machines or len(machines) < len(ppdf.machines):
        raise FormatError(f"a PPDF is for {', '.join(MACHINES)}, not for {', '.join(ppdf.machines) or 'nothing'}")
    images = {name: encode_code(program, architecture(name)) for name in machines}
    notes = notes_of(program, images[machines[0]], architecture(machines[0]))
    info, instructions, code, body, sources, builds, kernels, ebpf, templates = (Writer(strings) for _ in range(9))
    companions, blocks = Writer(strings), Writer(strings)
    info.string(ppdf.tool)
    is_joined = bool(ppdf.companions) or ppdf.blocks is not None
    info.u32((NEEDS_WRITE if ppdf.needs_write else 0) | (IS_JOINED if is_joined else 0))
    instructions.u32(isa.VERSION)
    write_images(code, images)
    write_program(body, program, notes, spans)
    if ppdf.blocks is None:
        blocks.u32(0)
    else:
        from dprobes.ppdf.treewriter import write_blocks

        write_blocks(blocks, ppdf.blocks, spans)
    companions.u32(len(ppdf.companions))
    for companion in ppdf.companions:
        companions.block(encode(companion))
    spans.write(sources)
    write_builds(builds, ppdf.builds)
    write_kernels(kernels, ppdf.kernels)
    write_ebpf(ebpf, ppdf.ebpf)
    templates.u32(len(ppdf.templates))
    for name, data in ppdf.templates.items():
        templates.string(name)
        templates.block(data)
    sections = {
        "STRS": _string_table(strings),
        "INFO": info.data,
        "ISET": instructions.data,
        "SRCE": sources.data,
        "CODE": code.data,
        "PROG": body.data,
        "BILD": builds.data,
        "KERN": kernels.data,
        "EBPF": ebpf.data,
        "TMPL": templates.data,
        "COMP": companions.data,
        "TOOL": blocks.data,
    }
    return pack({name: bytes(data) for name, data in sections.items()})


def _string_table(strings: Strings) -> bytearray:
    """Return the section of strings; all others name them by their numbers."""
    out = Writer(strings)
    out.u32(len(strings.all))
    for text in strings.all:
        if NO_TEXT.search(text):
            raise FormatError(f"a PPDF holds names and lines of text only, not {text[:40]!a}")
        raw = text.encode()
        if len(raw) > STRING_MAX:
            raise FormatError(
                f"a PPDF holds strings of at most {STRING_MAX} bytes, not of {len(raw)}: '{text[:40]}...'"
            )
        out.block(raw)
    return out.data
