"""Where in a program a position is: in a comment, at the place of a probe, or in a block, and of which probe."""

from __future__ import annotations

import re

from dprobes.lazydataclass import dataclass
from dprobes.lazypattern import lazy_pattern

__all__ = ["Position", "position_at"]

_PIECE = lazy_pattern(r'//[^\n]*|/\*.*?(?:\*/|\Z)|"(?:[^"\\\n]|\\.)*(?:"|(?=\n)|\Z)|[{};]', re.DOTALL)
_NAME = lazy_pattern(r"[A-Za-z_]\w*")
_PARAMETERS = lazy_pattern(r"\(([^()]*(?:\([^()]*\)[^()]*)*)\)")
_TYPES = frozenset(("char", "short", "int", "long", "unsigned", "signed", "void", "size_t", "bool", "_Bool", "const"))


@dataclass(frozen=True, slots=True)
class Position:
    """
    A position in DProbes C.

    ``head`` is the text before the block that it is in, that is places and conditions, or before the position where it
    is in none. ``is_text`` says that it is within a comment or a string.
    """

    head: str
    in_block: bool
    is_text: bool

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters of the probe or function."""
        match = _PARAMETERS.search(self.head.partition(" when ")[0])
        if match is None:
            return ()
        names = (_NAME.findall(each) for each in match[1].split(","))
        return tuple(found[-1] for found in names if found and found[-1] not in _TYPES)

    @property
    def is_return(self) -> bool:
        """Whether the probe is at a return."""
        return re.search(r"(?:^|,)\s*(?:\[[^\]]*\]\s*)?return\s", self.head) is not None

    @property
    def events(self) -> tuple[str, ...]:
        """The tracepoints and system calls of the probe, as ``tracepoint:SUBSYSTEM:NAME`` and ``syscall:NAME``."""
        found = re.findall(r"\b(tracepoint|syscall)\s+([\w:]+)", self.head)
        return tuple(f"{kind}:{name}" for kind, name in found)


def position_at(text: str, offset: int) -> Position:
    """Return where an offset is."""
    depth, start = 0, 0
    head = ""
    for match in _PIECE.finditer(text):
        if match.start() >= offset:
            break
        piece = match.group()
        if piece[0] in '/"':
            is_open = match.end() > offset or (match.end() == offset and (piece[:2] == "//" or not _is_closed(piece)))
            if is_open:
                return Position(head if depth else text[start : match.start()], depth > 0, is_text=True)
        elif piece == "{":
            if depth == 0:
                head = text[start : match.start()]
            depth += 1
        elif piece == "}":
            depth = max(0, depth - 1)
            start = match.end()
        elif depth == 0:
            start = match.end()
    if depth:
        return Position(_plain(head), in_block=True, is_text=False)
    return Position(_plain(text[start:offset]), in_block=False, is_text=False)


def _is_closed(piece: str) -> bool:
    return (piece.endswith("*/") and len(piece) > 3) or (len(piece) > 1 and piece[0] == piece[-1] == '"')


def _plain(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL).strip()
