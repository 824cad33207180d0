"""
Write docs/man/dprobes.8 and docs/man/dprobes.lang.8; with --check only compare.

The sources of the pages are the commands of click, the table of the original's options, and the tables of instructions,
keywords and registers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import man_command
import man_language

OUTPUT = Path(__file__).parent.parent / "docs" / "man"

PAGES = {"dprobes.8": man_command.page, "dprobes.lang.8": man_language.page}


def main(arguments: list[str]) -> int:
    for name, page in PAGES.items():
        path, text = OUTPUT / name, page()
        if arguments != ["--check"]:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f"{name} is not what the program says: run 'make docs'", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
