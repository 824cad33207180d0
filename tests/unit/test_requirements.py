"""``DPROBES_REQUIRE``: skips that are failures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.requirements import is_required, required_words

SKIPPING = """
import pytest

def test_call():
    pytest.skip("gdb is not installed")

@pytest.mark.skipif(True, reason="needs root")
def test_set_up(): ...

@pytest.mark.xfail(strict=True)
def test_expected_failure():
    assert False

def test_nature():
    pytest.skip("processor: it lacks sse4a")
"""


@pytest.mark.parametrize(
    ("words", "outcome"),
    [
        ("", {"skipped": 3, "xfailed": 1}),
        ("all", {"failed": 1, "error": 1, "skipped": 1, "xfailed": 1}),
        ("gdb", {"failed": 1, "skipped": 2, "xfailed": 1}),
        ("all,processor", {"failed": 2, "error": 1, "xfailed": 1}),
    ],
)
def test_skips_fail_where_what_they_lack_is_required(tmp_path: Path, words: str, outcome: dict[str, int]) -> None:
    file = tmp_path / "test_skipping.py"
    file.write_text(SKIPPING)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    environment = os.environ | {"DPROBES_REQUIRE": words, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    summary = done.stdout.splitlines()[-1]
    assert outcome == {
        word: int(number) for number, word in re.findall(r"(\d+) (failed|error|skipped|xfailed)", summary)
    }


def test_a_word_is_required_where_a_reason_has_it_as_a_word() -> None:
    assert is_required("needs gdb: apt-get install gdb", frozenset({"gdb"}))
    assert not is_required("gdbserver is not installed", frozenset({"gdb"}))
    assert is_required("bpf(2) is not to be used here: EPERM", frozenset({"bpf"}))


def test_words_are_separated_by_commas() -> None:
    assert required_words({"DPROBES_REQUIRE": "all, Processor,"}) == {"all", "processor"}
    assert required_words({}) == frozenset()
