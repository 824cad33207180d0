"""
The messages of errors and warnings with their hints, read from the sources; docs/reference/messages.md shows them.

A message is the first argument of an exception of ``dprobes.errors``, or the second argument of ``Diagnostics.error``
and ``Diagnostics.warning``. A value in it is shown as ``…``. Messages that other expressions compute are omitted.
"""

from __future__ import annotations

import ast
import html
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCES = Path(__file__).parent.parent / "src" / "dprobes"

MARK = "<!-- messages -->"
"""The line of the page that the messages replace."""

KINDS = {
    "SourceError": "Errors in programs",
    "warning": "Warnings about programs",
    "TargetError": "TargetError",
    "EngineError": "EngineError",
    "NotSupportedError": "NotSupportedError",
    "PrivilegeError": "PrivilegeError",
    "FormatError": "FormatError",
    "SinkError": "SinkError",
    "RecordsRefusedError": "RecordsRefusedError",
    "ManagerError": "ManagerError",
    "InternalError": "InternalError",
}
"""The kinds of messages, and their headings."""


@dataclass(frozen=True, slots=True, order=True)
class Message:
    """A message of a kind, and the hint below it, which may be empty."""

    kind: str
    text: str
    hint: str = ""

    @property
    def anchor(self) -> str:
        """The name of the message's place in the page."""
        return "-".join(re.findall(r"[a-z0-9]+", self.text.lower()))


def messages(sources: Path = SOURCES) -> list[Message]:
    """Return the messages of all modules, by kind, in alphabetical order."""
    found = {message for path in sources.rglob("*.py") for message in messages_of(path.read_text())}
    return sorted(found, key=lambda message: (list(KINDS).index(message.kind), message.text.lower(), message.hint))


def messages_of(source: str) -> Iterator[Message]:
    """Iterate over the messages of a module."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        match node.func, node.args:
            case ast.Name(id=kind), [text, *_] if kind in KINDS:
                pass
            case ast.Attribute(attr=("error" | "warning") as name), [_, text, *_]:
                kind = "warning" if name == "warning" else "SourceError"
            case _:
                continue
        hints = [text_of(each.value) for each in node.keywords if each.arg == "hint"]
        if message := text_of(text):
            yield Message(kind, message, hints[0] if hints else "")


def text_of(node: ast.expr) -> str:
    """
    Return the text of a string literal, with a mark for each value in it.

    Return an empty string for any other expression.
    """
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            text = "".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts)
            return text if re.search(r"[a-z]", text) else ""
        case _:
            return ""


def page(text: str) -> str:
    """Return the page with the messages in place of the mark."""
    lines = []
    known: set[str] = set()
    kind = ""
    for message in messages():
        if message.kind != kind:
            kind = message.kind
            lines += ["", f"## {KINDS[kind]}", ""]
        place = "" if message.anchor in known else f'<a id="{message.anchor}"></a>'
        known.add(message.anchor)
        hint = f"<br>hint: {as_code(message.hint)}" if message.hint else ""
        lines.append(f"* {place}{as_code(message.text)}{hint}")
    return text.replace(MARK, "\n".join(lines))


def as_code(text: str) -> str:
    return f"<code>{html.escape(text).replace('`', '&#96;').replace('*', '&#42;').replace('_', '&#95;')}</code>"
