"""Descriptions of sets: what is read, and the messages for what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from dprobes.errors import SourceError
from dprobes.sets import is_set_name
from dprobes.sets.set_description import GROUPS, SetField, parse_set

GOOD = """[set]
name = "sample"
major = 200
version = 1
summary = "a sample"
needs = ["root"]

[modules]
LIBC = ["libc.so.6"]

[places]
OPEN = ["usdt LIBC:libc:open", "LIBC:open"]

[[probe]]
name = "sample.file.open"
summary = "a file is opened"
file = "files.dpc"
minor = 1
group = "io"
type = "begin"
engines = ["ebpf", "ptrace"]
fields = ["path:string", "flags:int"]

[[test]]
run = "cat /etc/hostname"
expect = { "sample.file.open" = 1 }
programs = ["cat"]
"""
WHERE = Path("/sets/sample")


def problems(text: str, directory: Path = WHERE) -> str:
    with pytest.raises(SourceError) as raised:
        parse_set(directory, text)
    return raised.value.message


def test_a_description_is_read() -> None:
    found = parse_set(WHERE, GOOD)
    assert (found.name, found.major, found.version, found.summary, found.needs) == (
        "sample",
        200,
        1,
        "a sample",
        ("root",),
    )
    assert (found.modules, found.places["OPEN"]) == ({"LIBC": ("libc.so.6",)}, ("usdt LIBC:libc:open", "LIBC:open"))
    (probe,) = found.probes
    assert (probe.name, probe.file, probe.minor, probe.type) == ("sample.file.open", "files.dpc", 1, "begin")
    assert probe.fields == (SetField("path", "string"), SetField("flags", "int"))
    assert (found.groups, found.files, probe.span.line) == (("io",), ("files.dpc",), 14)
    assert found.tests[0].expect == {"sample.file.open": 1}


VIEW = """
[[view]]
name = "sizes"
question = "which sizes are there?"
file = "sizes.dpc"
"""


def test_views_are_read_and_have_the_codes_after_that_of_the_set() -> None:
    second = VIEW.replace("sizes", "largest").replace('file = "largest.dpc"', 'sql = """\nselect 1\nfrom records"""')
    first, other = parse_set(WHERE, GOOD + VIEW + second).views
    assert first[:5] == ("sizes", "which sizes are there?", "sizes.dpc", "", 201)
    assert other[:5] == ("largest", "which largest are there?", "", "select 1\nfrom records", 202)
    assert other.span.line == 34


@pytest.mark.parametrize(
    ("old", "new", "line", "message", "hint"),
    [
        ('"sizes"', '"Sizes"', 30, "expected a name such as 'queries' or 'off-cpu', found 'Sizes'", None),
        (
            '"sizes.dpc"',
            '"../x.dpc"',
            32,
            "expected a file of the set in DProbes C, such as 'view.dpc', found '../x.dpc'",
            None,
        ),
        (
            'file = "sizes.dpc"\n',
            "",
            29,
            "the view 'sizes' has neither 'file' nor 'sql'",
            "file is a program of the set in DProbes C, sql a query on the records of its probes",
        ),
        (
            'file = "sizes.dpc"\n',
            'file = "sizes.dpc"\nsql = "select 1"\n',
            29,
            "the view 'sizes' has both 'file' and 'sql'",
            "file is a program of the set in DProbes C, sql a query on the records of its probes",
        ),
        ('question = "which sizes are there?"\n', "", 29, "'[[view]]' has no 'question'", "add question = a string"),
        (VIEW, VIEW * 2, 35, "there are two views 'sizes'", "rename one of them"),
        (
            VIEW,
            "".join(VIEW.replace("sizes", f"sizes{n}") for n in range(16)),
            104,
            "a set has at most 15 views, found 16",
            None,
        ),
    ],
)
def test_mistakes_in_views(old: str, new: str, line: int, message: str, hint: str | None) -> None:
    said = problems(GOOD + VIEW.replace(old, new)).splitlines()
    assert said[0] == f"/sets/sample/set.toml:{line}:1: error: {message}"
    assert said[3:] == ([] if hint is None else [f"hint: {hint}"])


def test_an_error_has_its_line_what_was_expected_and_what_was_found() -> None:
    text = GOOD.replace('group = "io"', 'group = "files"')
    assert problems(text) == (
        "/sets/sample/set.toml:19:1: error: unknown group 'files'\n"
        '    group = "files"\n'
        "    ^~~~~~~~~~~~~~~\n"
        f"hint: expected {', '.join(repr(each) for each in list(GROUPS)[:-1])} or 'lifecycle'"
    )


@pytest.mark.parametrize(
    ("old", "new", "line", "message", "hint"),
    [
        ("major = 200", "major = 70000", 3, "expected a number from 0 to 16383 as 'major', found 70000", None),
        ("major = 200", "major = true", 3, "expected a number as 'major', found true", None),
        ("major = 200", 'major = "200"', 3, "expected a number as 'major', found '200'", None),
        ("version = 1\n", "", 1, "'[set]' has no 'version'", "add version = a number"),
        ("version = 1", "verzion = 1", 4, "unknown key 'verzion'", "did you mean 'version'?"),
        (
            'name = "sample"',
            'name = "Sample"',
            2,
            "expected a name such as 'sqlite' or 'net.tcp', found 'Sample'",
            None,
        ),
        (
            'name = "sample"',
            'name = "other"',
            2,
            "the set 'other' is in a directory 'sample'",
            "give both the same name",
        ),
        (
            'needs = ["root"]',
            'needs = ["luck"]',
            6,
            "unknown word 'luck' in 'needs'",
            "expected 'root', 'symbols', 'usdt', 'btf' or 'debuginfo'",
        ),
        ("LIBC =", "libc =", 9, "expected the name of a macro in capitals, found 'libc'", None),
        ('LIBC = ["libc.so.6"]', "LIBC = []", 9, "'LIBC' has no alternative", "name at least one"),
        (
            '"sample.file.open"\nsum',
            '"file.open"\nsum',
            15,
            "expected a name such as 'sample.object.event', found 'file.open'",
            None,
        ),
        (
            "files.dpc",
            "../files.dpc",
            17,
            "expected a file of the set in DProbes C, such as 'main.dpc', found '../files.dpc'",
            None,
        ),
        ("minor = 1", "minor = 0", 18, "expected a number from 1 to 65535 as 'minor', found 0", None),
        ('type = "begin"', 'type = "start"', 20, "unknown type 'start'", "expected 'begin', 'end' or 'event'"),
        ('["ebpf", "ptrace"]', "[]", 21, "'engines' is empty", "expected 'inline', 'ebpf' or 'ptrace'"),
        (
            "path:string",
            "path",
            22,
            "expected a field as 'name:kind', found 'path'",
            "kinds are: int, time, string, address, bytes",
        ),
        (
            "path:string",
            "path:text",
            22,
            "unknown kind 'text' of the field 'path'",
            "kinds are: int, time, string, address, bytes",
        ),
        ('"path:string"', "3", 22, "expected a list of strings as 'fields', found 3 in it", None),
        (
            '{ "sample.file.open" = 1 }',
            "{}",
            26,
            "expected numbers of records by probe",
            'write expect = { "NAME" = 3 }',
        ),
        (
            '{ "sample.file.open"',
            '{ "sample.file.opem"',
            26,
            "the set has no probe 'sample.file.opem'",
            "did you mean 'sample.file.open'?",
        ),
        (
            '"sample.file.open" = 1',
            '"sample.file.open" = -1',
            26,
            "expected a number of records for 'sample.file.open', found -1",
            None,
        ),
        ("[[test]]", "[[tests]]", 24, "unknown table 'tests'", "did you mean 'test'?"),
        ("[[test]]", "[test]", 24, "expected a table '[[test]]'", "write it as [[test]]"),
        ("major = 200", "major = ", 3, "invalid value", "the format is TOML 1.0"),
    ],
)
def test_wrong_descriptions(old: str, new: str, line: int, message: str, hint: str | None) -> None:
    assert old in GOOD
    said = problems(GOOD.replace(old, new, 1))
    places = [each.partition(f": error: {message}") for each in said.splitlines()]
    assert [place.rsplit(":", 1)[0] for place, error, rest in places if error and not rest] == [
        f"/sets/sample/set.toml:{line}"
    ]
    if hint is not None:
        assert f"\nhint: {hint}" in said


def test_codes_and_names_of_probes_are_unique() -> None:
    probe = GOOD[GOOD.index("[[probe]]") : GOOD.index("[[test]]")]
    said = problems(GOOD + "\n" + probe)
    assert "set.toml:30:1: error: there are two probes 'sample.file.open'" in said
    assert "set.toml:33:1: error: 'sample.file.open' has the minor code 1 of 'sample.file.open'" in said
    other = probe.replace("file.open", "file.close")
    assert "'sample.file.close' has the minor code 1 of 'sample.file.open'" in problems(GOOD + "\n" + other)


def test_a_set_has_a_probe() -> None:
    text = GOOD[: GOOD.index("[[probe]]")]
    assert problems(text) == "error: '/sets/sample/set.toml' has no probe\nhint: write one as [[probe]]"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("sqlite", True),
        ("net.tcp", True),
        ("a.b.c", False),
        ("Sqlite", False),
        ("../x", False),
        (".x", False),
        ("", False),
    ],
)
def test_names_of_sets(word: str, expected: bool) -> None:
    assert is_set_name(word) == expected
