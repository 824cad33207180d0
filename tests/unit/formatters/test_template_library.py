"""The paper's three calls: initialise, format one record, terminate."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

import dprobes
from dprobes.record.log_record import LogRecord, encode_record

if TYPE_CHECKING:
    from pathlib import Path

RECORD = encode_record(LogRecord(major=1, minor=1, pid=42, time=1_000_000_000, data=struct.pack("<q", 7)))
HEX = "DProbes(1,1) pid=42 tsc=00000001:00000000\n07 00 00 00 00 00 00 00"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "templates.lst").write_text("1 one.fmt\n2 two.fmt\n")
    (tmp_path / "one.fmt").write_text('major = 1\nminor = 1\nfmt = "n=%d"\n')
    (tmp_path / "two.fmt").write_text('major = 2\nminor = 1\nfmt = "%y"\n')
    return tmp_path


def test_a_record_is_formatted_after_initialise(directory: Path) -> None:
    library = dprobes.TemplateLibrary(wall_offset=0)
    library.initialise(directory)
    assert library.format(RECORD) == "DProbes(1,1) pid=42 tsc=00000001:00000000\nn=7"
    library.terminate()


def test_templates_are_cached_until_they_are_read_again(directory: Path) -> None:
    library = dprobes.TemplateLibrary(wall_offset=0)
    library.initialise(str(directory))
    assert library.format(RECORD).endswith("\nn=7")
    (directory / "one.fmt").write_text('major = 1\nminor = 1\nfmt = "number %d"\n')
    assert library.format(RECORD).endswith("\nn=7")
    library.terminate()
    library.initialise(directory)
    assert library.format(RECORD).endswith("\nnumber 7")
    (directory / "templates.lst").write_text("")
    library.initialise(directory)
    assert library.format(RECORD) == HEX


def test_only_the_directory_file_is_read_before_the_first_record(directory: Path) -> None:
    library = dprobes.TemplateLibrary(wall_offset=0)
    library.initialise(directory)
    (directory / "one.fmt").unlink()
    assert library.format(RECORD) == HEX
    assert library.diagnostics.render() == (
        f"{directory}/templates.lst:1:3: error: '{directory}/one.fmt': no such file or directory\n"
        "    1 one.fmt\n      ^~~~~~~"
    )


def test_a_wrong_template_is_none_and_said(directory: Path) -> None:
    library = dprobes.TemplateLibrary(wall_offset=0)
    library.initialise(directory)
    assert library.format(encode_record(LogRecord(major=2, minor=1, data=b"\1"))) == "DProbes(2,1)\n01"
    assert library.diagnostics.render().startswith(f"{directory}/two.fmt:3:9: error: unknown conversion 'y'\n")
    library.terminate()
    assert len(library.diagnostics) == 0


def test_what_cannot_be_done_is_an_error(directory: Path) -> None:
    library = dprobes.TemplateLibrary()
    with pytest.raises(dprobes.FormatError) as caught:
        library.format(RECORD)
    assert caught.value.message == "the template library is not initialised"
    assert caught.value.hint == "call 'initialise(directory)' before"
    with pytest.raises(dprobes.FormatError, match=r"templates\.lst': no such file or directory"):
        library.initialise(directory / "nowhere")
    library.initialise(directory)
    with pytest.raises(dprobes.FormatError, match="a record of 2 bytes has no flag word"):
        library.format(b"\1\2")
    library.terminate()
    with pytest.raises(dprobes.FormatError, match="the template library is not initialised"):
        library.format(RECORD)
    (directory / "templates.lst").write_text("one one.fmt\n")
    with pytest.raises(dprobes.SourceError, match="expected a major code, found 'one'"):
        library.initialise(directory)


def test_a_failed_initialise_leaves_what_was_there(directory: Path) -> None:
    library = dprobes.TemplateLibrary(wall_offset=0)
    library.initialise(directory)
    with pytest.raises(dprobes.FormatError):
        library.initialise(directory / "nowhere")
    assert library.format(RECORD).endswith("\nn=7")


def test_times_are_of_this_machine_if_nothing_else_is_said(directory: Path) -> None:
    from dprobes.record.record_origin import wall_offset

    library = dprobes.TemplateLibrary()
    library.initialise(directory)
    seconds = int(library.format(RECORD).partition("tsc=")[2][:8], 16)
    assert abs(seconds - (wall_offset() + 1_000_000_000) // 1_000_000_000) <= 1
