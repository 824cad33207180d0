"""Whatever is in template files and records, there is a text, or diagnostics, and never a terminal code."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.formatters import FORMATS, Place, formatter
from dprobes.formatters.templates import data_extraction as fields_module
from dprobes.formatters.templates import template_renderer
from dprobes.formatters.templates.data_extraction import compiled_of, decode_fields, fields_of
from dprobes.formatters.templates.template_collection import Templates
from dprobes.formatters.templates.template_renderer import render
from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_origin import RecordSource
from support.record_strategies import records
from unit.formatters.templates.support import formatted, item, template_of

WORDS = (
    "major", "minor", "desc", "fmt", "=", "=", "\n", "\n", " ", "1", "0x1", "65536", '"', '"', "\\", "\\n", "\\x1b",
    "/*", "*/", "//", "%", "%d", "%*s", "%*h", "%r", "%{pid}", "%{", "}", "%-08", ".4", "b", "w", "d", "q", "n", "x",
    "c", "s", "a", "p", "h", "*", "+9", "\x1b", "ä", "\u2028", "\r",
)  # fmt: skip

PLACE_HOLDERS = (
    "%d", "%u", "%x", "%o", "%c", "%s", "%p", "%a", "%bd", "%wu", "%dx", "%qo", "%nc", "%08x", "%-8d", "%.3d", "%8.3x",
    "%.5s", "%*s", "%*c", "%*bx", "%*04wx", "%*d", "%*h", "%*p", "%*.2s", "%r", "%*r", "%+3", "%{pid}", "%-9{name}",
    "%%", "x=", " ", "text",
)  # fmt: skip

NUMBERS = ("%d", "%u", "%x", "%o", "%p", "%bd", "%wu", "%dx", "%qo", "%nd", "%dp", "%08x", "%-8d", "%3d",
           "%.3d", "%8.3x", "%08.3d", "%-08d", "%+3", "%%", "x=", " ", "100%%", "\\n")  # fmt: skip


def files(text: bytes) -> dict[str, bytes]:
    return {"templates.lst": b"1 t.fmt", "t.fmt": text}


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_any_bytes_are_read(directory: bytes, text: bytes) -> None:
    templates = Templates.from_files({"templates.lst": directory, "t.fmt": text})
    assert isinstance(templates.diagnostics.render(), str)
    Templates.from_files(files(text)).diagnostics.render()


@given(st.lists(st.sampled_from(WORDS), max_size=40).map("".join), records())
def test_any_words_are_read(text: str, record: LogRecord) -> None:
    templates = Templates.from_files(files(f"major = 1\nminor = 1\n{text}".encode()))
    assert isinstance(templates.diagnostics.render(), str)
    for template in templates.all():
        assert harmless(render(template, record))
    Templates.from_files({"templates.lst": text.encode()}).diagnostics.render()


@given(st.lists(st.sampled_from(WORDS), max_size=20).map("".join), records())
def test_any_string_is_read(text: str, record: LogRecord) -> None:
    line = text.replace('"', "").replace("\n", "").replace("\\", "")
    templates = Templates.from_files(files(f'major = 1\nminor = 1\nfmt = "{line}"\n'.encode()))
    template = templates.find(1, 1)
    assert (template is None) == templates.diagnostics.has_errors
    if template is not None:
        assert harmless(render(template, record))


def harmless(text: str) -> bool:
    return all(c.isprintable() or c in "\n\t" for c in text)


@given(st.lists(st.lists(st.sampled_from(PLACE_HOLDERS), max_size=8).map("".join), max_size=4), records())
def test_any_record_is_formatted(lines: list[str], record: LogRecord) -> None:
    template = template_of("\n".join(f'fmt = "{line}"' for line in lines))
    assert harmless(render(template, record))
    fields = fields_of(template, record.word_size)
    assert len(fields) == len({field.name for field in fields})
    assert all(field.name.isidentifier() and field.name.isascii() for field in fields)
    decoded = decode_fields(template, record)
    assert len(decoded.values) == len(fields)
    assert len(decoded.rest) <= len(record.data)


@given(st.lists(st.sampled_from(PLACE_HOLDERS), max_size=8).map("".join), records(), st.sampled_from(FORMATS))
def test_every_format_takes_any_record(line: str, record: LogRecord, name: str) -> None:
    text = f'major = 1\nminor = 1\ndesc = "one"\nfmt = "{line}"\n'.encode()
    form = formatter(name, wall_offset=1, source=RecordSource(1, "p", templates=files(text)), live=True)
    some = record._replace(major=1, minor=1)
    assert form.encoded(encode_record(some), Place("m", "s")) == form(some, Place("m", "s"))


@given(st.lists(st.sampled_from(NUMBERS), max_size=10).map("".join), records(), st.binary(min_size=80, max_size=80))
def test_the_short_way_says_what_the_long_one_says(line: str, record: LogRecord, data: bytes) -> None:
    template = template_of(f'desc = "50%"\nfmt = "{line}"\nfmt = "{line}"')
    short = compiled_of(template, record.word_size, record.byte_order)
    assert short is not None
    for size in (short.layout.size, short.layout.size + 1, max(0, short.layout.size - 1)):
        some = record._replace(data=(data * 5)[:size])
        text, decoded = render(template, some), decode_fields(template, some)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(template_renderer, "compiled_of", lambda *_: None)
            patch.setattr(fields_module, "compiled_of", lambda *_: None)
            assert text == render(template, some)
            assert decoded == decode_fields(template, some)


def test_a_wide_template_has_a_bounded_text() -> None:
    assert len(formatted("%*80bx", item(0, bytes(65535)))) == 65535 * 81 - 1
    assert formatted("%.65535s|", b"a").startswith("<missing 65534 bytes>|")


def test_long_lines_take_no_longer_than_their_length() -> None:
    for line in ("a" * 200_000, "a " * 100_000, "%%" * 100_000, "%d" + "a_" * 100_000 + "%d", "\\\\" * 100_000):
        template = template_of(f'fmt = "{line}"')
        assert render(template, LogRecord())
        assert fields_of(template, 8) is not None
    for text in ("/* " * 70_000, " " * 200_000, "1 " * 100_000, '"' * 200_000, "= " * 100_000, "\n" * 200_000):
        Templates.from_files(files(text.encode())).diagnostics.render()
        Templates.from_files({"templates.lst": text.encode()}).diagnostics.render()
