"""
Find words for which the glossary has another word: in sources, messages and documentation.

``docs/reference/glossary.md`` is the only list: the last column of its tables has the words to avoid. A plain entry
matches whole words, independent of case and of the blanks between them; an entry in backticks matches in identifiers.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
SUFFIXES = (".py", ".md", ".sh", ".rpn", ".8")
PLACES = ("src", "docs", "tools", "examples", "benchmarks", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")


def refused(text: str) -> dict[str, str]:
    """Return the words to avoid, each with the word of the glossary."""
    words = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 3 and cells[0] != "term" and cells[2]:
            words.update({word.strip(): cells[0] for word in cells[2].split(",")})
    return words


def pattern_of(words: dict[str, str]) -> re.Pattern[str]:
    """Return a pattern that matches one of the words, in a group."""
    alternatives = [
        re.escape(word.strip("`")) if "`" in word else rf"\b{re.escape(word)}\b".replace(r"\ ", r"\s+")
        for word in sorted(words, key=len, reverse=True)
    ]
    return re.compile(f"({'|'.join(alternatives)})", re.IGNORECASE)


def files() -> Iterator[Path]:
    """Iterate over the files to check."""
    for place in PLACES:
        path = ROOT / place
        for each in [path] if path.is_file() else sorted(path.rglob("*")):
            if each.is_file() and each.suffix in SUFFIXES and each not in (GLOSSARY, Path(__file__)):
                yield each


def main() -> int:
    """Print each place with a word to avoid; return 1 if there is one."""
    words = {word.strip("`").lower(): term for word, term in refused(GLOSSARY.read_text(encoding="utf-8")).items()}
    pattern = pattern_of(refused(GLOSSARY.read_text(encoding="utf-8")))
    count = 0
    for path in files():
        text = path.read_text(encoding="utf-8")
        for found in pattern.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            term = words[re.sub(r"\s+", " ", found[0]).lower()]
            print(f"{path.relative_to(ROOT)}:{line}: '{found[0]}': the glossary says '{term}'")
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
