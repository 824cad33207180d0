"""What is wrong with template files is said with the place, and right templates beside wrong ones are there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.errors import FormatError
from dprobes.formatters.templates.template_collection import Templates
from unit.formatters.templates.support import problems, problems_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("fmt", "column", "length", "message", "hint"),
    [
        ("%i", 9, 1, "unknown conversion 'i'", "write '%d'"),
        ("%ld", 9, 1, "unknown conversion 'l'", "sizes are b (1), w (2), d (4), q (8) and n (word): '%qd'"),
        ("%f", 9, 1, "unknown conversion 'f'",
         "there are no floating-point numbers; '%qx' prints the bits of a double"),
        ("%8*d", 10, 1, "unknown conversion '*'", "for an item '*' comes first: '%*8d'"),
        ("%y", 9, 1, "unknown conversion 'y'",
         "conversions are d u x X o c s p a h e v k T E U I r; '%%' prints a percent sign"),
        ("100%", 11, 1, "a place-holder without its conversion at the end of the text", "'%%' prints a percent sign"),
        ("%-08", 8, 4, "a place-holder without its conversion at the end of the text", None),
        ("%b", 8, 2, "a place-holder without its conversion at the end of the text", None),
        ("%'d", 9, 1, "unknown flag \"'\"", "flags are '-', '0', '+', '#' and a blank"),
        ("%.8~d", 8, 5, "'~' is for the string of an item: '%*.200~s'", None),
        ("%U", 8, 2, "conversion 'U' prints the name of a number", "write the names: '%dE{IDLE=0,BUSY=7}'"),
        ("%4000d" * 21, 1, 3, "the widths and precisions of a template are at most 80000 together", None),
        ("%#p", 9, 1, "flag '#' is for numbers", None),
        ("%*+s", 10, 1, "flag '+' is for numbers", None),
        ("%-d", 8, 2, "a flag needs a width", "'%-8d', '%08x'"),
        ("%4096d", 9, 4, "expected a width of at most 4095, found 4096", None),
        ("%99999999999999999999d", 9, 20, "expected a width of at most 4095, found 99999999999999999999", None),
        ("%.4096d", 9, 5, "expected a precision of at most 4095, found 4096", None),
        ("%*81d", 8, 5, "expected a width and precision of at most 80 for elements, found 81", None),
        ("%.99999s", 9, 6, "expected a precision of at most 65535, found 99999", None),
        ("%.4{pid}", 8, 8, "a precision is for data and for the process name", "'%.4{name}'"),
        ("%.d", 8, 2, "'.' needs a precision", "'%.8x', '%.16s'"),
        ("%.4c", 9, 2, "conversion 'c' takes no precision", None),
        ("%.4p", 9, 2, "conversion 'p' takes no precision", None),
        ("%08c", 9, 2, "flag '0' is for numbers", None),
        ("%08s", 9, 2, "flag '0' is for numbers", None),
        ("%bs", 9, 1, "conversion 's' takes no size", "'%.16s' takes 16 characters"),
        ("%ds", 9, 1, "conversion 's' takes no size", "write '%nds' for a number and the letter 's'"),
        ("%wa", 9, 1, "an address has no 2 bytes; sizes are d (4), q (8), n (word)", None),
        ("%bp", 9, 1, "an address has no 1 byte; sizes are d (4), q (8), n (word)", None),
        ("%h", 8, 2, "'h' dumps an item", "write '%*h', or '%r' for all the rest in hexadecimal"),
        ("%*8h", 8, 4, "'%*h' takes no width, precision or size", None),
        ("%*bh", 8, 4, "'%*h' takes no width, precision or size", None),
        ("%k", 8, 2, "'k' lists the addresses of an item", "write '%*k'"),
        ("%*8k", 8, 4, "'%*k' takes no width, precision or size", None),
        ("%E", 8, 2, "conversion 'E' prints the name of a number", "write the names: '%dE{IDLE=0,BUSY=7}'"),
        ("%dE{A=1", 8, 7, "'E{' without its '}'", None),
        ("%dE{A=1,B}", 12, 5, "expected NAME=number, found 'B'", "write the names: '%dE{IDLE=0,BUSY=7}'"),
        ("%.4dE{A=1}", 9, 2, "conversion 'E' takes no precision", None),
        ("%.4v", 9, 2, "conversion 'v' takes no precision", None),
        ("%08v", 9, 2, "flag '0' is for numbers", None),
        ("%*8r", 8, 4, "'%*r' takes no width, precision or size", None),
        ("%8r", 8, 3, "'%r' takes no width, precision or size", None),
        ("%+", 8, 2, "'%+' needs the number of bytes to skip", "'%+4' skips 4 bytes"),
        ("%+0", 8, 3, "expected 1 to 65535 bytes to skip, found 0", None),
        ("%+65536", 8, 7, "expected 1 to 65535 bytes to skip, found 65536", None),
        ("%{pid", 8, 5, "'%{' without its '}'", None),
        ("%{pud}", 10, 3, "there is no header item 'pud'", "did you mean 'uid'?"),
        ("%{}", 8, 2, "there is no header item ''",
         "header items are major, minor, cpu, pid, tid, uid, name, cs, ip, ss, sp, time"),
        ("%08{pid}", 8, 8, "flag '0' is for numbers", None),
        ("%*{pid}", 8, 2, "'*' is for data; a header item takes none", None),
        ("%(n", 8, 3, "'%(' without its ')'", "'%(size)d' is a number whose field is 'size'"),
        ("%(a b)d", 8, 6, "expected the name of a field, found 'a b'",
         "names are of letters, digits and underscores: '%(size)d'"),
        ("%()d", 8, 3, "expected the name of a field, found ''",
         "names are of letters, digits and underscores: '%(size)d'"),
        ("%(" + "n" * 65 + ")d", 8, 68, "expected a name of at most 64 characters, found 65", None),
        ("%(n[])d", 8, 7, "'[]' is for the numbers of an item", "write '%(n)d'"),
        ("%(n[])*k", 8, 8, "'[]' is for the numbers of an item", "write '%(n)*k'"),
        ("%(n){pid}", 8, 9, "a name in brackets is for data; a header item has one", None),
        ("%(n)*8h", 8, 7, "'%*h' takes no width, precision or size", None),
        ("%(n)", 8, 4, "a place-holder without its conversion at the end of the text", None),
        (r"\q", 8, 2, r"unknown escape '\q'", "escapes are those of C"),
        (r"\400", 8, 4, r"'\400' is not a byte", None),
        (r"\x100", 8, 5, r"'\x100' is not a byte", None),
    ],
)  # fmt: skip
def test_wrong_place_holders(fmt: str, column: int, length: int, message: str, hint: str | None) -> None:
    expected = f't.fmt:3:{column}: error: {message}\n    fmt = "{fmt}"\n    {" " * (column - 1)}^{"~" * (length - 1)}'
    assert problems_of(fmt) == expected + (f"\nhint: {hint}" if hint else "")


def test_all_mistakes_of_a_string_are_said() -> None:
    assert problems_of("%d %y %i %d").count("error") == 2


def test_a_wrong_template_is_left_out_and_those_beside_it_are_there() -> None:
    text = b'major = 1\nminor = 1\nfmt = "%d"\nminor = 2\nfmt = "%y"\nfmt = "%d"\nminor = 3\nfmt = "%d"\n'
    templates = Templates.from_files({"templates.lst": b"1 t.fmt", "t.fmt": text})
    assert [template.minor for template in templates.all()] == [1, 3]
    assert templates.find(1, 2) is None


def test_strings_may_go_on_and_their_mistakes_are_found_there() -> None:
    text = 'major = 1\nminor = 1\nfmt = "a%"  "d"\n      "b%y"\n'
    assert problems(("templates.lst", "1 t.fmt"), ("t.fmt", text)) == (
        "t.fmt:4:10: error: unknown conversion 'y'\n          \"b%y\"\n             ^\n"
        "hint: conversions are d u x X o c s p a h e v k T E U I r; '%%' prints a percent sign"
    )


FILE_ERRORS = [
    (
        'minor = 1\nfmt = "x"\n',
        "t.fmt:1:1: error: the file does not say its major code\n    minor = 1\n    ^\nhint: major = 1",
    ),
    (
        "major = 2\nminor = 1\n",
        "t.fmt:1:9: error: the file is for major 2, but the directory names it for 1\n    major = 2\n            ^",
    ),
    (
        "major = 1\nmajor = 1\n",
        (
            "t.fmt:2:1: error: a file has the templates of one major code\n    major = 1\n    ^~~~~~~~~\n"
            "t.fmt:1:1: note: the first one is here\n    major = 1\n    ^~~~~~~~~"
        ),
    ),
    (
        "minor = 1\nmajor = 1\n",
        "t.fmt:2:1: error: 'major =' comes before the first 'minor ='\n    major = 1\n    ^~~~~~~~~",
    ),
    (
        'major = 1\nfmt = "x"\n',
        (
            "t.fmt:2:1: error: 'fmt' outside of a template\n    fmt = \"x\"\n    ^~~\n"
            "hint: a template begins with 'minor ='"
        ),
    ),
    (
        'major = 1\nminor = 1\nftm = "x"\n',
        "t.fmt:3:1: error: unknown keyword 'ftm'\n    ftm = \"x\"\n    ^~~\nhint: did you mean 'fmt'?",
    ),
    (
        "major = 1\nminor = 1\n7 = 8\n",
        "t.fmt:3:1: error: unknown keyword '7'\n    7 = 8\n    ^\nhint: keywords are major, minor, desc, fmt, probe",
    ),
    (
        'major = 1\nminor = 1\nfmt "x"\n',
        "t.fmt:3:1: error: expected '=' after 'fmt'\n    fmt \"x\"\n    ^~~",
    ),
    (
        "major = 1\nminor =\n",
        "t.fmt:2:1: error: expected a value after 'minor ='\n    minor =\n    ^~~~~~~",
    ),
    (
        "major = 1\nminor = 1 2\n",
        "t.fmt:2:11: error: expected the end of the line after the minor code\n    minor = 1 2\n              ^",
    ),
    (
        "major = 1\nminor = one\n",
        "t.fmt:2:9: error: expected a minor code, found 'one'\n    minor = one\n            ^~~",
    ),
    (
        "major = 1\nminor = 1x\n",
        "t.fmt:2:9: error: '1x' is not a number\n    minor = 1x\n            ^~",
    ),
    (
        "major = 1\nminor = 65536\n",
        "t.fmt:2:9: error: expected a minor code from 0 to 65535, found 65536\n    minor = 65536\n            ^~~~~",
    ),
    (
        "major = 1\nminor = 1\nfmt = x\n",
        "t.fmt:3:7: error: expected a string, found 'x'\n    fmt = x\n          ^\nhint: fmt = \"...\"",
    ),
    (
        'major = 1\nminor = 1\ndesc = "a"\ndesc = "b"\n',
        "t.fmt:4:1: error: a template has one 'desc'\n    desc = \"b\"\n    ^~~~",
    ),
    (
        'major = 1\nminor = 1\nprobe = "a.b.c"\nprobe = "a.b.d"\n',
        "t.fmt:4:1: error: a template has one 'probe'\n    probe = \"a.b.d\"\n    ^~~~~",
    ),
    (
        'major = 1\nminor = 1\nfmt = "a\n',
        't.fmt:3:7: error: unterminated string\n    fmt = "a\n          ^',
    ),
    (
        "major = 1\n/* no end\nminor = 1\n",
        "t.fmt:2:1: error: unterminated comment\n    /* no end\n    ^~",
    ),
    (
        "major = 1\nminor = 1 §\n",
        "t.fmt:2:11: error: unexpected character '§'\n    minor = 1 §\n              ^",
    ),
]


@pytest.mark.parametrize(("text", "expected"), FILE_ERRORS)
def test_wrong_template_files(text: str, expected: str) -> None:
    assert problems(("templates.lst", "1 t.fmt"), ("t.fmt", text)) == expected


def test_of_two_templates_for_a_minor_the_first_one_is_taken() -> None:
    text = 'major = 1\nminor = 1\nfmt = "first"\nminor = 1\nfmt = "second"\n'
    templates = Templates.from_files({"templates.lst": b"1 t.fmt", "t.fmt": text.encode()})
    assert templates.diagnostics.render() == (
        "t.fmt:4:1: warning: minor 1 is there already; the first template is taken\n    minor = 1\n    ^~~~~~~~~\n"
        "t.fmt:2:1: note: the first one is here\n    minor = 1\n    ^~~~~~~~~"
    )
    assert not templates.diagnostics.has_errors
    template = templates.find(1, 1)
    assert template is not None
    assert str(template.lines) == "((Text(text='first'),),)"


def test_templates_of_a_file_for_another_major_are_not_taken() -> None:
    files = {"templates.lst": b"1 t.fmt", "t.fmt": b'major = 2\nminor = 1\nfmt = "x"\n'}
    templates = Templates.from_files(files)
    assert templates.all() == ()
    assert not templates


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 t.fmt\n1 u.fmt\n",
         ("templates.lst:2:1: warning: major 1 is there already; the first file is taken\n    1 u.fmt\n    ^\n"
         "templates.lst:1:1: note: the first one is here\n    1 t.fmt\n    ^")),
        ("1 t.fmt\n2 t.fmt\n",
         ("templates.lst:2:3: error: a file has the templates of one major code\n    2 t.fmt\n      ^~~~~\n"
         "templates.lst:1:3: note: it is named here before\n    1 t.fmt\n      ^~~~~")),
        ("1\n", "templates.lst:1:1: error: expected 'major file'\n    1\n    ^\nhint: 1  kernel.fmt"),
        ("1 t.fmt x\n",
         "templates.lst:1:9: error: expected the end of the line after 'major file'\n    1 t.fmt x\n            ^"),
        ("one t.fmt\n", "templates.lst:1:1: error: expected a major code, found 'one'\n    one t.fmt\n    ^~~"),
        ("09 t.fmt\n",
         ("templates.lst:1:1: error: expected a major code, found '09'\n    09 t.fmt\n    ^~\n"
         "hint: a leading 0 means octal")),
        ("70000 t.fmt\n",
         "templates.lst:1:1: error: expected a major code from 0 to 65535, found 70000\n    70000 t.fmt\n    ^~~~~"),
        ("1 ../t.fmt\n",
         ("templates.lst:1:3: error: expected the name of a file without directories, found '../t.fmt'\n"
         "    1 ../t.fmt\n      ^~~~~~~~\nhint: put the file beside 'templates.lst'")),
        ("1 templates.lst\n",
         ("templates.lst:1:3: error: expected the name of a file without directories, found 'templates.lst'\n"
         "    1 templates.lst\n      ^~~~~~~~~~~~~\nhint: put the file beside 'templates.lst'")),
        (f"1 {'é' * 128}\n",  # 256 bytes
         (f"templates.lst:1:3: error: expected the name of a file without directories, found '{'é' * 128}'\n"
         f"    1 {'é' * 128}\n      ^{'~' * 127}\nhint: put the file beside 'templates.lst'")),
        ("2 other.fmt\n",
         "templates.lst:1:3: error: there is no file 'other.fmt'\n    2 other.fmt\n      ^~~~~~~~~"),
    ],
)  # fmt: skip
def test_wrong_directory_files(text: str, expected: str) -> None:
    assert problems(("templates.lst", text), ("t.fmt", "major = 1\n")) == expected


def test_a_comment_without_an_end_in_a_directory_file() -> None:
    assert problems(("templates.lst", "1 t.fmt\n/* no end\n" + "/* " * 200_000), ("t.fmt", "major = 1\n")) == (
        "templates.lst:2:1: error: unterminated comment\n    /* no end\n    ^~"
    )


def test_a_directory_file_has_comments_and_any_c_number() -> None:
    text = b"/* all of\nthem */ 0x1 t.fmt // one\r\n\n  007\tseven-7.fmt\n"
    files = {
        "templates.lst": text,
        "t.fmt": b'\xef\xbb\xbfMAJOR = 0x1\r\nMinor = 0x10 /* two\nlines */\r\nFmt = "x"\r\n',
        "seven-7.fmt": b"major = 7\nminor = 1",
    }
    templates = Templates.from_files(files)
    assert templates.diagnostics.render() == ""
    assert [(template.major, template.minor) for template in templates.all()] == [(1, 16), (7, 1)]


def test_templates_without_a_directory_file() -> None:
    assert problems(("t.fmt", "major = 1")) == (
        "error: there are templates, but no 'templates.lst'\nhint: 'templates.lst' has a line 'major file' for each"
    )
    assert Templates.from_files({}).diagnostics.render() == ""


def test_a_file_that_is_no_text() -> None:
    files = {"templates.lst": b"1 t.fmt", "t.fmt": b'major = 1\nminor = 1\nfmt = "\xe4"'}
    assert Templates.from_files(files).diagnostics.render() == ("error: 't.fmt' is not UTF-8 text: byte 0xe4 in line 3")
    assert (
        "has more than 1048576 bytes"
        in Templates.from_files({"templates.lst": b"1 t.fmt", "t.fmt": bytes(1 << 21)}).diagnostics.render()
    )


def test_a_template_has_a_limit() -> None:
    text = 'major = 1\nminor = 1\nfmt = "' + "%bd" * 1001 + '"\nfmt = "x"\n'
    message = "t.fmt:3:1: error: a template has at most 1000 lines, and 1000 strings and place-holders in them\n"
    assert problems(("templates.lst", "1 t.fmt"), ("t.fmt", text)).startswith(message)
    lines = "major = 1\nminor = 1\n" + 'fmt = ""\n' * 1001
    message = message.replace("t.fmt:3", "t.fmt:1003")
    assert problems(("templates.lst", "1 t.fmt"), ("t.fmt", lines)).startswith(message)


def test_a_directory_on_disk(tmp_path: Path) -> None:
    with pytest.raises(FormatError) as caught:
        Templates.from_directory(tmp_path)
    assert caught.value.message == f"'{tmp_path}/templates.lst': no such file or directory"
    assert caught.value.hint == "a directory of templates has a file 'templates.lst' with lines 'major file'"
    (tmp_path / "templates.lst").write_text("1 t.fmt\n2 u.fmt\n")
    (tmp_path / "t.fmt").write_text('major = 1\nminor = 1\nfmt = "%y"\n')
    (tmp_path / "other.txt").write_text("of no interest")
    templates = Templates.from_directory(tmp_path)
    assert templates.diagnostics.render() == (
        f"{tmp_path}/t.fmt:3:9: error: unknown conversion 'y'\n    fmt = \"%y\"\n            ^\n"
        "hint: conversions are d u x X o c s p a h e v k T E U I r; '%%' prints a percent sign\n"
        f"{tmp_path}/templates.lst:2:3: error: there is no file '{tmp_path}/u.fmt'\n    2 u.fmt\n      ^~~~~"
    )


def test_of_a_directory_on_disk_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    (tmp_path / "templates.lst").write_text("1 t.fmt\n2 u.fmt\n")
    (tmp_path / "t.fmt").write_text("major = 1\nminor = 1\n")
    (tmp_path / "u.fmt").write_text("nonsense")
    templates = Templates.from_directory(tmp_path, {1, 3})
    assert templates.diagnostics.render() == ""
    assert [(template.major, template.minor) for template in templates.all()] == [(1, 1)]
    assert templates.carried(None) == {"templates.lst": b"1 t.fmt\n", "t.fmt": b"major = 1\nminor = 1\n"}
    (tmp_path / "t.fmt").unlink()
    (tmp_path / "t.fmt").mkdir()
    with pytest.raises(FormatError, match=r"t\.fmt': is a directory"):
        Templates.from_directory(tmp_path, {1, 3})


def test_what_is_carried_is_what_records_of_some_majors_need() -> None:
    files = {
        "templates.lst": b"/* a comment */ 1 t.fmt\n 2 u.fmt\n3 v.fmt",
        "t.fmt": b"major = 1",
        "u.fmt": b"major = 2",
        "v.fmt": b"major = 3",
    }
    templates = Templates.from_files(files)
    carried = templates.carried([3, 1, 9])
    assert carried == {"templates.lst": b"1 t.fmt\n3 v.fmt\n", "t.fmt": b"major = 1", "v.fmt": b"major = 3"}
    assert Templates.from_files(carried).diagnostics.render() == ""
    assert templates.carried([9]) == {}
    assert templates.carried(None).keys() == files.keys()
