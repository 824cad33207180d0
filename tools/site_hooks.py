"""
Hooks of MkDocs: the navigation comes from the index pages, messages from the sources, pictures from runs.

An index page, such as docs/how-to/index.md, lists the pages of its directory as ``* [TITLE](PAGE.md): ...``; the
navigation has them in this order. A page that no index lists is a warning, which the strict build makes an error.

``make site`` makes the pictures of docs/assets/pictures/ again, in ``PICTURES``; the site has those where they exist.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))
import message_catalogue
from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

SECTIONS = {"tutorial": "Tutorial", "how-to": "How-to", "reference": "Reference", "explanation": "Explanation"}
"""Directories of docs/ and their titles, in the order of the navigation."""

PICTURES = Path(__file__).parent.parent / ".cache" / "pictures"

LISTED = re.compile(r"\* \[[^\]]+\]\(([\w-]+\.md)\)")
FENCE = re.compile(r"^( *```\w+) .+$", re.MULTILINE)
"""Pattern of the language of a code block and of the words after it, which tests read and MkDocs does not support."""
GROUP = re.compile(r"\*\*(.+)\*\*")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    docs = Path(config.docs_dir)
    config.nav = ["index.md", *({title: listed(docs / name)} for name, title in SECTIONS.items())]
    return config


def listed(directory: Path) -> list[str | dict[str, list[str]]]:
    """Return the pages of a section in the order of its index page, the index first; a line in bold begins a group."""
    pages: list[str | dict[str, list[str]]] = [f"{directory.name}/index.md"]
    group: list[str] | None = None
    for line in (directory / "index.md").read_text().splitlines():
        if heading := GROUP.fullmatch(line):
            group = []
            pages.append({heading[1]: group})
        elif page := LISTED.match(line):
            (pages if group is None else group).append(f"{directory.name}/{page[1]}")
    return pages


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in sorted(PICTURES.glob("*")):
        old = files.get_file_from_path(f"assets/pictures/{path.name}")
        if old is not None:
            files.remove(old)
            files.append(File.generated(config, old.src_uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    if page.file.src_uri == "reference/messages.md":
        return message_catalogue.page(markdown)
    return FENCE.sub(r"\1", markdown)
