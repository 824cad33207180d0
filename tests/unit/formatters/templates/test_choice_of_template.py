"""A first look at templates from files to text: details are in the other files."""

from __future__ import annotations

import struct

from dprobes.formatters.templates.data_extraction import Decoded, Fault, Field, FieldKind, decode_fields, fields_of
from dprobes.formatters.templates.template_collection import Templates
from dprobes.formatters.templates.template_renderer import render
from dprobes.record.log_record import LogRecord

FILES = {
    "templates.lst": b"/* template directory */\n1  kernel.fmt\n",
    "kernel.fmt": b"""
major = 1                           // agrees with the directory
minor = 1
desc  = "kill_proc entry"
fmt   = "pid=%d sig=%3d"
fmt   = "name=%*s from=%*s: %*h"
fmt   = "done by %{pid}"
""",
}


def item(token: int, data: bytes) -> bytes:
    return struct.pack("<BH", token, len(data)) + data


RECORD = LogRecord(
    major=1,
    minor=1,
    pid=7,
    data=struct.pack("<qq", 42, -9)
    + item(1, b"sleep")
    + item(0xFF, struct.pack("<Q", 0x1000))
    + item(0, b"abc")
    + b"\x01\x02\x03",
)


def test_a_record_is_formatted_by_the_template_of_its_codes() -> None:
    templates = Templates.from_files(FILES)
    assert list(templates.diagnostics) == []
    template = templates.find(1, 1)
    assert template is not None
    assert render(template, RECORD) == (
        "kill_proc entry\n"
        "pid=42 sig= -9\n"
        "name=sleep from=<fault at 0x1000>: \n"
        "0x00000000 : 616263                              : abc\n"
        "done by 7\n"
        "<3 bytes left: 01 02 03>"
    )
    assert templates.find(1, 2) is None
    assert templates.find(2, 1) is None


def test_its_data_are_named_fields() -> None:
    template = Templates.from_files(FILES).find(1, 1)
    assert template is not None
    assert fields_of(template, 8) == (
        Field("pid", FieldKind.SIGNED, 8, 10, is_array=False),
        Field("sig", FieldKind.SIGNED, 8, 10, is_array=False),
        Field("name", FieldKind.STRING, 0, 10, is_array=False),
        Field("from", FieldKind.STRING, 0, 10, is_array=False),
        Field("arg4", FieldKind.BYTES, 0, 16, is_array=False),
    )
    values = (42, -9, "sleep", Fault(0x1000), b"abc")
    assert decode_fields(template, RECORD) == Decoded(values, b"\x01\x02\x03")
