"""``--templates``, ``check`` for templates, and the verb ``format``."""

from __future__ import annotations

import csv
import io
import json
import struct
from pathlib import Path

import pytest

from dprobes.cli.main import run
from dprobes.ppdf.ppdf_file import decode
from dprobes.record.line_frames import lost_frame, record_frame
from dprobes.record.log_record import LogRecord, encode_record
from support.trace_files import header, lost, places, program, records

ONE = 'major = 1\nminor = 1\ndesc = "one"\nfmt = "n=%d by %{name}"\n'
FILES = {"templates.lst": "1 one.fmt\n", "one.fmt": ONE}
RECORD = encode_record(LogRecord(major=1, minor=1, time=1_000, process_name="app", data=struct.pack("<q", -7)))
HEADER = "DProbes(1,1) name=app tsc=00000000:00000001"
LINE = "0.000001  one\n    n=-7 by app\n"
MINE = "0.000001  app  mine -7\n"
PROGRAM = 'name = "*"\nmajor = 1\nsampler = 10hz\nminor = 1\n  exit\nsampler = 20hz\nminor = 2\n  exit\n'


def write(directory: Path, files: dict[str, str]) -> Path:
    directory.mkdir(exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)
    return directory


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("good"), FILES)
    write(Path("wrong"), {"templates.lst": "1 one.fmt\n", "one.fmt": ONE + 'minor = 2\nfmt = "%y"\n'})
    write(Path("other"), {"templates.lst": "2 two.fmt\n", "two.fmt": "major = 2\nminor = 1\n"})
    Path("p.rpn").write_text(PROGRAM)


def trace(**templates: str) -> bytes:
    names = {name.replace("_", "."): text for name, text in templates.items()}
    return (
        header(wall_offset=0, boot_id="another")
        + program(1, "app", module="/bin/app", templates=names)
        + places(1, ("main", "", None))
        + records(1, (0, RECORD))
    )


def outcome(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = run(arguments)
    return (status, *capsys.readouterr())


WRONG = (
    "wrong/one.fmt:6:9: error: unknown conversion 'y'\n    fmt = \"%y\"\n            ^\n"
    "hint: conversions are d u x X o c s p a h e v k T E U I r; '%%' prints a percent sign\n"
)


def test_format_prints_a_trace_file_by_the_templates_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.dpt").write_bytes(trace(templates_lst="1 one.fmt", one_fmt=ONE))
    assert outcome(capsys, "format", "t.dpt") == (0, LINE, "")
    assert outcome(capsys, "log", "t.dpt") == (0, LINE, "")
    assert outcome(capsys, "log", "t.dpt", "--format", "dprobes") == (0, f"{HEADER}\none\nn=-7 by app\n", "")
    assert outcome(capsys, "format", "t.dpt", "--format", "hex") == (
        0, f"{HEADER}\nf9 ff ff ff ff ff ff ff\n", "",
    )  # fmt: skip


def test_templates_of_a_directory_are_asked_first(capsys: pytest.CaptureFixture[str]) -> None:
    mine = 'major = 1\nminor = 1\nfmt = "mine %d"\n'
    Path("t.dpt").write_bytes(trace(templates_lst="1 one.fmt", one_fmt=mine))
    for verb in ("format", "log"):
        assert outcome(capsys, verb, "t.dpt", "--templates", "good")[1] == LINE
        assert outcome(capsys, verb, "t.dpt", "--templates", "other")[1] == MINE
    write(Path("same"), {"templates.lst": "2 one.fmt\n", "one.fmt": "major = 2\nminor = 1\n"})
    assert outcome(capsys, "format", "t.dpt", "--templates", "same")[1] == MINE


def test_wrong_templates_in_a_trace_file_are_left_out_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = trace(templates_lst="1 one.fmt", one_fmt=ONE.replace("%d", "%y"))
    Path("t.dpt").write_bytes(wrong + records(1, (0, RECORD)))
    status, out, err = outcome(capsys, "format", "t.dpt")
    assert (status, out) == (0, "0.000001  app  main  f9 ff ff ff ff ff ff ff\n" * 2)
    assert err == (
        "dprobes: warning: templates of the program 'app' have errors, and are not used\n"
        "one.fmt:4:11: error: unknown conversion 'y'\n    fmt = \"n=%y by %{name}\"\n              ^\n"
        "hint: conversions are d u x X o c s p a h e v k T E U I r; '%%' prints a percent sign\n"
    )
    assert outcome(capsys, "format", "t.dpt", "--format", "hex")[2] == ""


def test_format_says_where_records_were_lost(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.dpt").write_bytes(trace() + lost(1, 3))
    assert outcome(capsys, "format", "t.dpt")[2] == "dprobes: warning: 3 records of 'app' were lost here\n"


def test_format_reads_a_stream_of_frames(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stream = record_frame(RECORD) + b"noise" + lost_frame(2) + record_frame(RECORD)
    Path("t.bin").write_bytes(stream)
    text = LINE * 2
    said = (
        "dprobes: warning: 2 records of '{0}' were lost here\n"
        "dprobes: warning: 5 bytes between the records of '{0}' are not records, and were skipped\n"
    )
    assert outcome(capsys, "format", "t.bin", "--templates", "good") == (0, text, said.format("t.bin"))

    class Input:
        buffer = io.BytesIO(stream)

    monkeypatch.setattr("sys.stdin", Input)
    assert outcome(capsys, "format", "-", "--templates", "good") == (0, text, said.format("standard input"))
    Input.buffer = io.BytesIO(trace(templates_lst="1 one.fmt", one_fmt=ONE))
    assert outcome(capsys, "format", "-") == (0, LINE, "")


def test_format_as_csv_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.dpt").write_bytes(trace(templates_lst="1 one.fmt", one_fmt=ONE) + records(1, (0, RECORD)))
    out = outcome(capsys, "format", "t.dpt", "--format", "csv")[1]
    rows = list(csv.DictReader(io.StringIO(out, newline="")))
    assert [(row["name"], row["symbol"], row["text"]) for row in rows] == [("app", "main", "one\nn=-7 by app")] * 2
    lines = [json.loads(line) for line in outcome(capsys, "format", "t.dpt", "--format", "json")[1].splitlines()]
    assert [line["fields"] for line in lines] == [{"n": -7}] * 2


@pytest.mark.parametrize("data", [b"", trace()[:0]])
def test_an_empty_file_has_no_records(data: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.dpt").write_bytes(data)
    assert outcome(capsys, "format", "t.dpt") == (0, "", "")


def test_what_is_no_trace_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(capsys, "format", "p.rpn") == (
        1, "", ("dprobes: error: 'p.rpn' holds no records\n"
        "hint: it may be a trace file (.dpt), or records as '--log-format binary' sends them\n"),
    )  # fmt: skip
    assert outcome(capsys, "format", "nothing") == (1, "", "dprobes: error: 'nothing': no such file or directory\n")
    assert outcome(capsys, "format", "good")[2] == "dprobes: error: 'good': is a directory\n"
    Path("cut.dpt").write_bytes(trace()[:-1] + b"\0")
    status, _, err = outcome(capsys, "format", "cut.dpt")
    assert (status, "'cut.dpt' is damaged" in err) == (1, True)


@pytest.mark.parametrize("line", [("format", "t.dpt"), ("log", "t.dpt"), ("build", "p.rpn"), ("check", "p.rpn")])
def test_wrong_templates_of_a_directory_are_an_error(line: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.dpt").write_bytes(trace())
    status, out, err = outcome(capsys, *line, "--templates", "wrong")
    # Who prints records does so without the templates that are wrong.
    prints = line[0] in ("format", "log")
    assert (status, bool(out)) == (0 if prints else 2, prints)
    assert err.endswith(WRONG)
    status, out, err = outcome(capsys, *line, "--templates", "p.rpn")
    assert (status, out) == (2, "")
    assert "Directory 'p.rpn' is a file" in err
    assert outcome(capsys, *line, "--templates", "nowhere") == (
        1, "", ("dprobes: error: 'nowhere/templates.lst': no such file or directory\n"
        "hint: a directory of templates has a file 'templates.lst' with lines 'major file'\n"),
    )  # fmt: skip
    assert not Path("p.ppdf").exists()


def test_build_carries_what_the_records_of_the_program_need(capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("good"), {"templates.lst": "/* all */ 1 one.fmt\n2 two.fmt\n", "two.fmt": "nonsense that nobody needs"})
    assert run(["build", "p.rpn", "--templates", "good"]) == 0
    assert dict(decode(Path("p.ppdf").read_bytes()).templates) == {
        "templates.lst": b"1 one.fmt\n",
        "one.fmt": ONE.encode(),
    }
    out = outcome(capsys, "show", "p.ppdf")[1]
    assert f"// template file 'one.fmt': {len(ONE)} bytes\n//   template 1,1: one\n" in out


@pytest.mark.parametrize(("code", "majors"), [("setmaj 3", {1, 3}), ("push 3; setmaj", {1, 2, 3}), ("nop", {1})])
def test_records_may_have_other_majors(code: str, majors: set[int]) -> None:
    lines = "".join(f"{major} f{major}.fmt\n" for major in (1, 2, 3))
    write(Path("many"), {"templates.lst": lines, **{f"f{n}.fmt": f"major = {n}\nminor = 1\n" for n in (1, 2, 3)}})
    Path("p.rpn").write_text(PROGRAM.replace("exit", f"{code}\n  exit", 1))
    assert run(["build", "p.rpn", "--templates", "many"]) == 0
    names = decode(Path("p.ppdf").read_bytes()).templates.keys()
    assert names == {"templates.lst", *(f"f{major}.fmt" for major in majors)}


def test_check_says_for_which_records_there_is_no_template(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(capsys, "check", "p.rpn", "--templates", "good") == (
        0, "", "p.rpn:7:1: note: 'good' has no template for the records 1,2\n    minor = 2\n    ^~~~~~~~~\n",
    )  # fmt: skip
    assert outcome(capsys, "check", "p.rpn", "--templates", "other") == (
        0, "", "warning: 'other' has no templates for major 1\n",
    )  # fmt: skip


def test_check_looks_at_templates(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(capsys, "check", "good") == (0, "", "")
    assert outcome(capsys, "check", "good/one.fmt") == (0, "", "")
    for name in ("wrong", "wrong/one.fmt", "wrong/templates.lst"):
        assert outcome(capsys, "check", name) == (2, "", WRONG)
    Path("good/one.fmt").write_text(ONE + "minor = 1\n")
    status, _, err = outcome(capsys, "check", "good")
    assert (status, err.splitlines()[0]) == (
        0, "good/one.fmt:5:1: warning: minor 1 is there already; the first template is taken",
    )  # fmt: skip
