"""The names of log targets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dprobes.errors import SinkError
from dprobes.sinks import SinkOptions
from dprobes.sinks.target_kinds import KINDS, parse_target

DOCUMENT = (Path(__file__).parents[3] / "docs" / "reference" / "log-targets.md").read_text()


def test_the_document_lists_all_that_there_are() -> None:
    (table,) = re.findall(r"^\| target \| destination \|\n\|---\|---\|\n((?:\| .*\n)+)\n", DOCUMENT, re.MULTILINE)
    listed = [parse_target(name).kind for name in re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)]
    assert sorted(kind.name for kind in listed) == sorted(kind.name for kind in KINDS)


@pytest.mark.parametrize(
    ("name", "kind", "argument", "text"),
    [
        ("KLOG", "klog", "", "KLOG"),
        ("klog", "klog", "", "KLOG"),
        ("com2", "serial", "/dev/ttyS1", "COM2"),
        ("serial:/dev/ttyUSB0", "serial", "/dev/ttyUSB0", "serial:/dev/ttyUSB0"),
        ("/var/log/x", "file", "/var/log/x", "file:/var/log/x"),
        ("./x:y", "file", "./x:y", "file:./x:y"),
        ("file:x", "file", "x", "file:x"),
        ("x.dpt", "file", "x.dpt", "file:x.dpt"),
        ("console", "console", "", "console"),
        ("ltt", "ctf", "", "LTT"),
        ("ctf:./traces", "ctf", "./traces", "ctf:./traces"),
    ],
)
def test_names(name: str, kind: str, argument: str, text: str) -> None:
    found = parse_target(name)
    assert (found.kind.name, found.argument, found.text) == (kind, argument, text)
    assert parse_target(found.text) == found


def test_a_path_is_made_absolute() -> None:
    assert parse_target("./log/../x").absolute(Path("/tmp")).text == "file:/tmp/x"
    assert parse_target("KLOG").absolute(Path("/tmp")).text == "KLOG"


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        (
            "nowhere",
            "there is no log target 'nowhere'",
            "'dprobes log-target kinds' lists them",
        ),
        ("file:/tmp/a\0b", "there is no log target 'file:/tmp/a\\x00b'", None),
        ("consol", "there is no log target 'consol'", "did you mean 'console'?"),
    ],
)
def test_names_that_are_no_targets(name: str, message: str, hint: str | None) -> None:
    with pytest.raises(SinkError) as caught:
        parse_target(name)
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file:relative", "log target 'file:relative': the path must be absolute"),
        ("file:", "log target 'file' needs a path: file:PATH"),
        ("serial:", "log target 'serial' needs a device: serial:/dev/ttyUSB0"),
        ("klog:x", "log target KLOG takes no argument, found 'x'"),
        ("console:x", "log target 'console' takes no argument, found 'x'"),
    ],
)
def test_arguments_that_cannot_be(name: str, message: str) -> None:
    with pytest.raises(SinkError) as caught:
        parse_target(name).open(SinkOptions())
    assert caught.value.message == message
