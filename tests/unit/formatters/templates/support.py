"""What the tests of templates share."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from dprobes.diagnostics import Diagnostics
from dprobes.formatters.templates.data_extraction import decode_fields
from dprobes.formatters.templates.template_collection import Templates
from dprobes.formatters.templates.template_renderer import render
from dprobes.record.log_record import LogRecord
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from dprobes.formatters.templates.template_model import Template
    from dprobes.rpn.rpn_program import Program


def item(token: int, data: bytes, length: int | None = None) -> bytes:
    """Return an item of a little-endian log buffer; ``length`` is what its prefix says."""
    return struct.pack("<BH", token, len(data) if length is None else length) + data


def template_of(body: str) -> Template:
    """Return the template with statements; they must be right."""
    templates = Templates.from_files({"templates.lst": b"1 t.fmt", "t.fmt": f"major = 1\nminor = 1\n{body}\n".encode()})
    assert templates.diagnostics.render() == ""
    template = templates.find(1, 1)
    assert template is not None
    return template


def formatted(fmt: str, data: bytes, **more: Any) -> str:
    """Return what a template with one line makes of data."""
    return render(template_of(f'fmt = "{fmt}"'), LogRecord(major=1, minor=1, data=data, **more))


def values(fmt: str, data: bytes, **more: Any) -> tuple[Any, ...]:
    """Return the values of the fields of a template with one line."""
    return decode_fields(template_of(f'fmt = "{fmt}"'), LogRecord(major=1, minor=1, data=data, **more)).values


def problems(*files: tuple[str, str]) -> str:
    """Return what is wrong with files, as users see it."""
    return Templates.from_files({name: text.encode() for name, text in files}).diagnostics.render()


def problems_of(fmt: str) -> str:
    """Return what is wrong with the string of a ``fmt`` statement."""
    return problems(("templates.lst", "1 t.fmt"), ("t.fmt", f'major = 1\nminor = 1\nfmt = "{fmt}"\n'))


def program_of(text: str) -> Program:
    """Return the program of a source, which is parsed, and not checked."""
    diagnostics = Diagnostics()
    program = parse_source(SourceFile("p.rpn", text), diagnostics, CompileOptions(allow_write=True))
    assert not diagnostics.render()
    return program
