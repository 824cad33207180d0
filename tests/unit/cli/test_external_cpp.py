"""Running another preprocessor."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

import pytest

from dprobes.cli import external_cpp
from dprobes.cli.external_cpp import external_preprocessor
from dprobes.diagnostics import Diagnostics
from dprobes.errors import SourceError
from dprobes.preprocessor import ExternalRequest, Preprocessed, preprocess
from dprobes.source_text import SourceFile, Span

if TYPE_CHECKING:
    from pathlib import Path

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


def run(text: str, command: str, *, name: str = "t.rpn") -> tuple[Preprocessed, str]:
    diagnostics = Diagnostics()
    defines = [("B", "1")]
    result = preprocess(SourceFile(name, text), diagnostics, defines=defines, external=external_preprocessor(command))
    return result, diagnostics.render()


def origin(result: Preprocessed, word: str) -> Span:
    start = result.text.index(word)
    return result.span(start, start + len(word))


@needs_gcc
def test_gcc_keeps_the_places_of_lines(tmp_path: Path) -> None:
    (tmp_path / "i.h").write_text("\nincluded here\n")
    name = str(tmp_path / "t.rpn")
    text = '#include "i.h"\n#define A 7\npush A // x\npop  /* y */\nexact 123\n'
    result, errors = run(text, "gcc -E", name=name)
    assert errors == ""
    assert [line.strip() for line in result.text.split("\n") if line.strip()] == [
        "included here",
        "push 7",
        "pop",
        "exact 123",
    ]
    assert f"{tmp_path}/i.h:2:10" == str(origin(result, "here"))
    assert f"{name}:5:7" == str(origin(result, "123"))
    assert (f"{name}:3:1", "push A // x") == (str(origin(result, "7")), origin(result, "7").text)


@needs_gcc
def test_errors_of_gcc_become_diagnostics() -> None:
    expected = """\
t.rpn:2:2: error: #error no
    #error no
     ^~~~~~~~"""
    assert expected == run("push 1\n#error no\n", "gcc -E")[1]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("no-such-program -E", "error: cannot run 'no-such-program': no such file or directory"),
        (
            "sh -c 'echo oops >&2; exit 3'",
            "error: 'sh -c 'echo oops >&2; exit 3'' failed with exit status 3\nnote: oops",
        ),
    ],
)
def test_a_preprocessor_that_fails_is_an_error(command: str, expected: str) -> None:
    assert expected == run("push 1\n", command)[1]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("gcc '", "error: malformed preprocessor command 'gcc '': no closing quotation"),
        ("", "error: the preprocessor command is empty\nhint: give one like '--cpp \"gcc -E\"'"),
    ],
)
def test_what_is_not_a_command_is_refused_at_once(command: str, expected: str) -> None:
    with pytest.raises(SourceError) as caught:
        external_preprocessor(command)
    assert expected == str(caught.value)


def test_a_preprocessor_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_cpp, "TIMEOUT", 0.1)
    command = f"{sys.executable} -c 'import time; time.sleep(9)'"
    with pytest.raises(SourceError) as caught:
        external_preprocessor(command)(ExternalRequest("", (), ()))
    assert str(caught.value) == f"error: '{command}' did not end within 0.1 seconds"
