"""The example programs that come with DProbes: in a checkout ``examples/``, of a wheel ``share/dprobes/examples``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SUFFIX", "Example", "all_examples", "example_directory", "example_templates", "find_example"]

SUFFIX = ".rpn"
_TEMPLATES = "templates"


class Example(NamedTuple):
    """An example program: its name, its file, and what it is for in a line."""

    name: str
    path: Path
    summary: str


def example_directory() -> Path | None:
    """Return the directory of the examples; None if this installation has none."""
    for root in (Path(__file__).parents[3], Path(sys.prefix) / "share" / "dprobes"):
        if (root / "examples" / f"malloc{SUFFIX}").is_file():
            return root / "examples"
    return None


def find_example(name: str) -> Path | None:
    """Return the file of the example of this name, with or without its suffix; None if there is none."""
    directory = example_directory()
    if directory is None or "/" in name:
        return None
    path = directory / f"{name.removesuffix(SUFFIX)}{SUFFIX}"
    return path if path.is_file() else None


def example_templates(path: Path) -> Path | None:
    """Return the directory of templates of the examples if ``path`` is one of their files."""
    directory = example_directory()
    if directory is None or path.parent != directory:
        return None
    return directory / _TEMPLATES


def all_examples() -> Iterator[Example]:
    """Return the examples in the order of their names."""
    directory = example_directory()
    for path in sorted(directory.glob(f"*{SUFFIX}"), key=lambda path: path.stem) if directory is not None else ():
        yield Example(path.name.removesuffix(SUFFIX), path, _summary(path.read_text(encoding="utf-8")))


def _summary(text: str) -> str:
    """Return the first sentence of the comment that a program begins with."""
    comment = []
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        comment.append(line.removeprefix("//").strip())
    sentence = re.match(r".*?[.?](?=\s|\Z)|.*?(?=:\s*dprobes|\s{2,}|\Z)", " ".join(comment))
    return sentence.group().rstrip(".:") if sentence is not None else ""
