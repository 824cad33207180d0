"""Write src/dprobes/api/mnemonics.pyi from the methods of the instruction table; with --check only compare."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.api import mnemonics

if TYPE_CHECKING:
    from collections.abc import Callable

OUTPUT = Path(__file__).parent.parent / "src" / "dprobes" / "api" / "mnemonics.pyi"

HEADER = """\
# One method for each instruction of the language.
# Written by ``make docs`` from ``rpn/instruction_set.py``; do not edit.
# ruff: noqa: PYI021 - editors show the documentation that is here
from abc import ABC, abstractmethod
from typing import Self

__all__ = ["Instructions"]

class Instructions(ABC):
"""


def method(function: Callable[..., object]) -> str:
    """Return the declaration of a method."""
    head, indentation = str(inspect.signature(function)).replace("'", ""), " " * 4
    marks = "@abstractmethod\n" if getattr(function, "__isabstractmethod__", False) else ""
    text = f"{marks}def {function.__name__}{head}:\n{textwrap.indent(docstring(function), indentation)}"
    return textwrap.indent(text, indentation)


def docstring(documented: object) -> str:
    """Return the docstring of a class or method; its first line is one sentence."""
    summary, *paragraphs = inspect.getdoc(documented).split("\n\n")
    if len(summary) > 110:
        summary, rest = re.split(r"; |\. ", summary, maxsplit=1)
        summary, paragraphs = f"{summary}.", [rest[:1].upper() + rest[1:], *paragraphs]
    if not paragraphs:
        return f'"""{summary}"""\n'
    wrapped = (
        "\n".join(textwrap.wrap(line, 112, break_on_hyphens=False)) for line in "\n\n".join(paragraphs).split("\n")
    )
    return f'"""\n{summary}\n\n' + "\n".join(wrapped) + '\n"""\n'


def document() -> str:
    """Return the text of the stub."""
    declared = [mnemonics.Instructions._add, *mnemonics.methods()]  # noqa: SLF001 - its type is needed, too
    return HEADER + "\n".join([textwrap.indent(docstring(mnemonics.Instructions), " " * 4), *map(method, declared)])


def main(arguments: list[str]) -> int:
    """Write the file, or with --check report whether it is out of date; return the exit status."""
    text = document()
    if arguments == ["--check"]:
        if OUTPUT.exists() and OUTPUT.read_text() == text:
            return 0
        print(f"{OUTPUT.name} is not what the table says: run 'make docs'", file=sys.stderr)
        return 1
    OUTPUT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
