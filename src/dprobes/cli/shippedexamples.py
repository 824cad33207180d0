"""The example programs that come with DProbes: in a checkout ``examples/``, of a wheel ``share/dprobes/examples``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SUFFIXES", "Example", "all_examples", "example_directory", "example_templates", "find_example"]

SUFFIXES = (".rpn", ".dpc")
"""Of programs in RPN, which have templates in a directory of their own, and in DProbes C, which print themselves."""

_TEMPLATES = "templates"


class Example(NamedTuple):
    """An example program: its name, its file, and what it is for in a line."""

    name: str
    path: Path
    summary: str


def example_directory() -> Path | None:
    """Return the directory of the examples; None if this installation has none."""
    for root in (Path(__file__).parents[3], Path(sys.prefix) / "share" / "dprobes"):
        if (root / "examples" / "malloc.rpn").is_file():
            return root / "examples"
    return None


def find_example(name: str) -> Path | None:
    """Return the file of the example of this name, with or without its suffix; None if there is none."""
    directory = example_directory()
    if directory is None or "/" in name:
        return None
    names = (name,) if name.endswith(SUFFIXES) else tuple(f"{name}{suffix}" for suffix in SUFFIXES)
    return next((path for each in names if (path := directory / each).is_file()), None)


def example_templates(path: Path) -> Path | None:
    """Return the directory of templates of the examples in RPN if ``path`` is one of them that has some."""
    directory = example_directory()
    if directory is None or path.parent != directory or path.suffix != ".rpn":
        return None
    templates = directory / _TEMPLATES
    return templates if (templates / f"{path.stem}.fmt").is_file() else None


def all_examples() -> Iterator[Example]:
    """Return the examples in the order of their names."""
    directory = example_directory()
    paths = () if directory is None else (path for path in directory.iterdir() if path.suffix in SUFFIXES)
    for path in sorted(paths, key=lambda path: path.stem):
        yield Example(path.stem, path, _summary(path.read_text(encoding="utf-8")))


def _summary(text: str) -> str:
    """Return the first sentence of the comment that a program begins with."""
    comment = []
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        comment.append(line.removeprefix("//").strip())
    sentence = re.match(r".*?[.?](?=\s|\Z)|.*?(?=:\s*dprobes|\s{2,}|\Z)", " ".join(comment))
    return sentence.group().rstrip(".:") if sentence is not None else ""
