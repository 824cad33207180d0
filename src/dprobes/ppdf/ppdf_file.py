"""Conversion of a compiled program to the bytes of a PPDF and back; invalid bytes raise ``FormatError`` only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.arch import architecture
from dprobes.errors import FormatError
from dprobes.ppdf.build_facts import read_builds, read_ebpf, read_kernels, write_builds, write_ebpf, write_kernels
from dprobes.ppdf.code_images import MACHINES, notes_of, read_images, write_images
from dprobes.ppdf.ppdf_model import Ppdf
from dprobes.ppdf.ppdf_sections import MAJOR, MINOR, NEWER_HINT, NO_TEXT, Reader, Section, Strings, Writer, pack, unpack
from dprobes.ppdf.program_definitions import Spans, read_program, read_sources, write_program
from dprobes.rpn import instruction_set
from dprobes.rpn.instruction_encoding import encode as encode_code
from dprobes.rpn.program_needs import patched_definitions, writing_instructions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.rpn.rpn_program import Program

__all__ = ["IS_JOINED", "NEEDS_WRITE", "STRING_MAX", "decode", "encode"]

NEEDS_WRITE = 1
"""Flag of a program that changes or stops its target."""

IS_JOINED = 2
"""Flag of a program with companions or blocks of the tool. A reader that does not support them must reject the file."""

STRING_MAX = 1 << 20
"""Maximum size of a string in bytes."""


def encode(ppdf: Ppdf) -> bytes:
    """
    Return the bytes of a PPDF, which are the same for equal values.

    Raise ``FormatError`` for values beyond the format.
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
    instructions.u32(instruction_set.VERSION)
    write_images(code, images)
    write_program(body, program, notes, spans)
    if ppdf.blocks is None:
        blocks.u32(0)
    else:
        from dprobes.ppdf.tool_trees import write_blocks

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
        templates.row("sb", name, data)
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
    """Return the section of strings, to which others refer by number; raise ``FormatError`` if one is invalid."""
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


_SECTIONS = {
    "STRS": "strings",
    "INFO": "the tool",
    "ISET": "the instruction set",
    "SRCE": "source lines",
    "CODE": "code",
    "PROG": "the program",
    "BILD": "builds of the module",
    "KERN": "kernels",
    "EBPF": "eBPF",
    "TMPL": "templates",
    "COMP": "companions",
    "TOOL": "blocks of the tool",
}
"""All sections of this version and their contents; each is required, in any order."""

_SINCE = {"ISET": 1, "KERN": 2, "COMP": 3, "TOOL": 3}
"""Minor version that introduced a section; sections that are not listed are in all versions."""

_TEMPLATE_SIZE, _COMPANION_SIZE = 8, 24

_SHARED = {
    "major": "major code",
    "vars": "number of variables",
    "gvars": "number of global variables",
    "cvars": "number of CPU variables",
    "tvars": "number of thread variables",
    "tables": "tables",
}
"""Properties that companions must have in common, by attribute, with their names in messages."""


def decode(data: bytes) -> Ppdf:
    """Return the contents of a PPDF; raise ``FormatError`` with the offset of the first invalid byte."""
    return _decode(data, is_companion=False)


def _decode(data: bytes, *, is_companion: bool) -> Ppdf:
    minor, sections = unpack(data)
    expected = {name: what for name, what in _SECTIONS.items() if _SINCE.get(name, 0) <= minor}
    for name, what in expected.items():
        if name not in sections:
            raise FormatError(f"expected a section {name} ({what}), found none", offset=len(data))
    unknown = [name for name in sections if name not in expected]
    if unknown and minor <= MINOR:
        raise FormatError(
            f"expected no section {unknown[0]} in version {MAJOR}.{minor}", offset=sections[unknown[0]].offset
        )
    strings = _read_strings(_reader(sections, "STRS"))
    info = _reader(sections, "INFO", strings)
    tool, flags_at, flags = info.string("the tool"), info.offset, info.u32("flags")
    known = NEEDS_WRITE | (IS_JOINED if "COMP" in expected and not is_companion else 0)
    if flags & ~known:
        info.fail(f"expected no flags but {known:#x}, found {flags:#x}", flags_at, hint=NEWER_HINT)
    info.end()
    if "ISET" in expected:
        _check_instruction_set(_reader(sections, "ISET"))
    spans = read_sources(_reader(sections, "SRCE", strings))
    images = read_images(_reader(sections, "CODE", strings))
    program = read_program(_reader(sections, "PROG", strings), spans, images)
    if not flags & NEEDS_WRITE and (writing := writing_instructions(program)):
        info.fail(f"'{writing[0]}' is in the program, but the flag {NEEDS_WRITE:#x} is not set", flags_at)
    if not flags & NEEDS_WRITE and patched_definitions(program):
        info.fail(f"'patch =' is in the program, but the flag {NEEDS_WRITE:#x} is not set", flags_at)
    definitions = len(program.definitions)
    companions: tuple[Ppdf, ...] = ()
    blocks = None
    if flags & IS_JOINED:
        companions = _read_companions(_reader(sections, "COMP", strings), program)
        from dprobes.ppdf.tool_trees import read_blocks

        blocks = read_blocks(_reader(sections, "TOOL", strings), program, spans)
    if not definitions and blocks is None:
        _reader(sections, "PROG").fail("expected at least one probe definition, found none")
    if not flags & IS_JOINED and "COMP" in expected:
        for name in ("COMP", "TOOL"):
            reader = _reader(sections, name)
            if reader.u32("a number"):
                reader.fail(f"expected nothing, for the flag {IS_JOINED:#x} is not set", sections[name].offset)
            reader.end()
    return Ppdf(
        program,
        tuple(image.architecture.name for image in images),
        read_builds(_reader(sections, "BILD", strings), definitions),
        bool(flags & NEEDS_WRITE),
        _read_templates(_reader(sections, "TMPL", strings)),
        read_ebpf(_reader(sections, "EBPF", strings), definitions),
        tool,
        read_kernels(_reader(sections, "KERN", strings), definitions) if "KERN" in expected else (),
        companions,
        blocks,
    )


def _read_companions(reader: Reader, program: Program) -> tuple[Ppdf, ...]:
    """Return the companions of a program, those for other modules; each is a complete PPDF inside this one."""
    found = []
    for number in range(reader.count(_COMPANION_SIZE, "companions")):
        size = reader.count(1, "bytes of a companion")
        at = reader.offset
        data = bytes(reader.take(size, "a companion"))
        try:
            companion = _decode(data, is_companion=True)
        except FormatError as error:
            raise FormatError(
                f"section COMP: companion {number}, from byte {at}: {error.message}", hint=error.hint
            ) from None
        for attribute, what in _SHARED.items():
            if getattr(companion.program, attribute) != getattr(program, attribute):
                reader.fail(f"expected the {what} of the first program in companion {number}", at)
        found.append(companion)
    reader.end()
    return tuple(found)


def _reader(sections: dict[str, Section], name: str, strings: Sequence[str] = ()) -> Reader:
    section = sections[name]
    return Reader(section.data, section.offset, f"section {name}", strings)


def _check_instruction_set(reader: Reader) -> None:
    """Raise ``FormatError`` for instructions of a newer dprobes; format 1.0 implies instruction set 1."""
    at, version = reader.offset, reader.u32("the version of the instruction set")
    if version > instruction_set.VERSION:
        raise FormatError(
            f"the program is in version {version} of the instruction set, and this dprobes reads versions up to "
            f"{instruction_set.VERSION}",
            offset=at,
            hint=NEWER_HINT,
        )
    if version == 0:
        reader.fail("expected a version from 1 on, found 0", at)
    reader.end()


def _read_strings(reader: Reader) -> list[str]:
    strings = []
    for _ in range(reader.count(4, "strings")):
        size = reader.count(1, "bytes of a string", STRING_MAX)
        at = reader.offset
        try:
            text = str(reader.take(size, "a string"), "utf-8")
        except UnicodeDecodeError as error:
            reader.fail("expected UTF-8, found something else", at + error.start)
        if (found := NO_TEXT.search(text)) is not None:
            reader.fail(f"expected no control characters, found {found[0]!a}", at)
        strings.append(text)
    reader.end()
    return strings


def _read_templates(reader: Reader) -> dict[str, bytes]:
    templates: dict[str, bytes] = {}
    for _ in range(reader.count(_TEMPLATE_SIZE, "templates")):
        at = reader.offset
        name = reader.string("the name of a template")
        if name in templates:
            reader.fail(f"there are two templates '{name}'", at)
        templates[name] = reader.block("bytes of a template")
    reader.end()
    return templates
