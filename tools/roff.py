"""Manual pages: text with the macros of man(7), escaped."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_WARNING = ".\\\" Written by 'make docs'; do not edit."


_WIDTH = 78
"""Maximum number of characters of a line, which mandoc -T lint checks."""

_CELL = 14
"""Maximum number of characters of a table's cell that is not filled."""

_MARKED = re.compile(r"(`[^`]+`|\*\*[^*]+\*\*|(?<!\S)\*\w[^*]*\*(?!\w))")


def escaped(text: str) -> str:
    """Return text in which roff finds no request and no escape, and in which '-' is the ASCII hyphen."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    return text.replace("^", "\\(ha").replace("~", "\\(ti").replace("…", "...")


def marked(text: str) -> str:
    """Return text with `code`, **bold** and *emphasis* in the fonts of manual pages."""
    return "".join(
        escaped(part) if n % 2 == 0 else (bold if part.startswith(("`", "**")) else italic)(part.strip("`*"))
        for n, part in enumerate(_MARKED.split(text))
    )


def bold(text: str) -> str:
    return f"\\fB{escaped(text)}\\fR"


def italic(text: str) -> str:
    return f"\\fI{escaped(text)}\\fR"


class Page:
    """A page under construction, as a list of lines."""

    def __init__(self, title: str, section: int, date: str, source: str, manual: str) -> None:
        self._lines = [_WARNING]
        # No hyphens in words, which may be names; in older versions of groff each heading allows them again.
        self._lines.append(".nr HY 0")
        self._lines.append(f'.TH "{title}" {section} "{date}" "{source}" "{manual}"')
        self._lines += [".nh", ".ad l"]

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def section(self, name: str) -> None:
        self._lines.append(f".SH {escaped(name.upper())}")

    def subsection(self, name: str) -> None:
        self._lines.append(f".SS {escaped(name)}")

    def _begin(self) -> None:
        """Begin a paragraph; a heading has begun one."""
        if not self._lines[-1].startswith((".SH", ".SS")):
            self._lines.append(".PP")

    def raw(self, text: str) -> None:
        """Add text that is already escaped; each sentence begins a line."""
        for sentence in re.sub(r"(?<=[.?]) (?=\S)", "\n", text).splitlines():
            lines = textwrap.wrap(sentence, _WIDTH, break_long_words=False, break_on_hyphens=False)
            self._lines += ["\\&" + line if line.startswith(".") else line for line in lines]

    def paragraph(self, text: str) -> None:
        """Add a paragraph, to which ``marked`` is applied."""
        self._begin()
        self.raw(marked(" ".join(text.split())))

    def item(self, tag: str, text: str, *more: str) -> None:
        """
        Add a term, which is already escaped, and its description.

        ``more`` are further paragraphs of the description.
        """
        self._lines += [".TP", tag]
        self.raw(marked(" ".join(text.split())))
        for each in more:
            self._lines.append(".IP")
            self.raw(marked(" ".join(each.split())))

    def example(self, text: str) -> None:
        """Add lines unchanged, as an example."""
        self._begin()
        self._lines += [".in +4n", ".EX", *(escaped(line) or "\\&" for line in text.strip("\n").splitlines())]
        self._lines += [".EE", ".in"]

    def synopsis(self, lines: Iterable[str]) -> None:
        """Add lines that are already escaped, each with its own hanging indentation."""
        for line in lines:
            self._lines += [".HP", line]

    def table(self, columns: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Add a table for tbl(1), with its column specification; long cells are filled."""
        self._lines[0] = "'\\\" t\n" + _WARNING
        self._begin()
        self._lines += [".TS", columns + ".", "\t".join(bold(cell) for cell in header)]
        for row in rows:
            filled = (f"T{{\n{escaped(cell)}\nT}}" if len(cell) > _CELL else escaped(cell) for cell in row)
            self._lines.append("\t".join(filled))
        self._lines.append(".TE")
