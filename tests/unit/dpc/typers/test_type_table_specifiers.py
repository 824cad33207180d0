"""Which words make a type: of all sequences of them what gcc says."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.dpc.compiler import compile_text
from dprobes.errors import SourceError
from dprobes.preprocessor import preprocess
from dprobes.source_text import SourceFile
from support.rounds import rounds

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")

LENGTH = rounds(4, 3)
WORDS = ("void", "char", "short", "int", "long", "signed", "unsigned", "_Bool",
         "static", "typedef", "const", "struct s", "t")  # fmt: skip
SEQUENCES = [" ".join(words) for count in range(1, LENGTH + 1) for words in itertools.product(WORDS, repeat=count)]
BEFORE = "struct s { int a; }; typedef int t;"


def refused_by_gcc(directory: Path) -> set[str]:
    source = directory / "declarations.c"
    source.write_text("\n".join([BEFORE, *(f"{words} *v{n};" for n, words in enumerate(SEQUENCES))]) + "\n")
    command = ["gcc", "-std=c17", "-fsyntax-only", "-fmax-errors=0", "-pedantic-errors", str(source)]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    found = [line.split(":") for line in said.splitlines()]
    return {SEQUENCES[int(line[1]) - 2] for line in found if len(line) > 3 and line[3] == " error"}


def is_refused(words: str) -> bool:
    diagnostics = Diagnostics()
    text = SourceFile("words.dpc", f"{BEFORE} {words} *v; f() {{ }}")
    try:
        compile_text(preprocess(text, diagnostics), diagnostics, module="m")
    except SourceError:
        return True
    return False


def test_the_words_of_a_type_are_those_of_gcc(tmp_path: Path) -> None:
    refused = refused_by_gcc(tmp_path)
    assert 0 < len(refused) < len(SEQUENCES)
    assert {words for words in SEQUENCES if is_refused(words)} == refused
