"""Analysis of a program in an editor, which may be unfinished: its diagnostics, and the parts that compile."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dprobes.diagnostics import Diagnostic, Diagnostics, Severity
from dprobes.errors import DprobesError, SourceError
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from dprobes.dpc.types.c_types import CType
    from dprobes.rpn.rpn_program import Program
    from dprobes.source_text import Span

__all__ = ["Analysis", "Position", "analyse", "is_c", "position_at", "word_at"]

_WORD = re.compile(r"[@$A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Analysis:
    """The analysis of a text: diagnostics, and the programs, one for each module, if it has no syntax errors."""

    source: SourceFile
    diagnostics: tuple[Diagnostic, ...]
    programs: tuple[Program, ...]
    types: tuple[tuple[Span, CType], ...] = ()
    """The types of expressions and parameters in DProbes C, in the order of compilation."""


def is_c(name: str) -> bool:
    """Return whether a file of this name is in DProbes C."""
    return name.endswith(".dpc")


def analyse(name: str, text: str) -> Analysis:
    """
    Compile a text and find its probepoints on this machine, like ``dprobes check``.

    ``name`` is the path of the file, whose directory is searched for included files. No text raises an exception.
    """
    source = _source(name, text)
    diagnostics = Diagnostics()
    options = CompileOptions(allow_write=True)
    programs: tuple[Program, ...] = ()
    found: dict[Diagnostic, None] = {}
    types: list[tuple[Span, CType]] = []
    try:
        if is_c(name):
            from dprobes.api.compiled_program import parse_c

            programs = parse_c(
                source, diagnostics, options, "", tell_type=lambda span, type_: types.append((span, type_))
            ).programs
        else:
            programs = (parse_source(source, diagnostics, options),)
        for program in programs:
            _resolve(program, found)
    except SourceError as error:
        found.update(dict.fromkeys(error.diagnostics))
        for program in error.outline:
            _resolve(program, found)
    except DprobesError as error:
        found[Diagnostic(Severity.ERROR, error.message, hint=error.hint)] = None
    except RecursionError:
        found[Diagnostic(Severity.ERROR, "this program is nested too deeply")] = None
    found.update(dict.fromkeys(diagnostics))
    return Analysis(source, tuple(found), programs, tuple(types))


def _source(name: str, text: str) -> SourceFile:
    if not is_c(name):
        return SourceFile(name, text)
    from dprobes.dpc.compiler import in_c

    return SourceFile(name, text, wording=in_c)


def _resolve(program: Program, found: dict[Diagnostic, None]) -> None:
    from dprobes.resolve.local_module import resolve_here

    diagnostics = Diagnostics()
    try:
        resolve_here(program, diagnostics, allow_write=True)
    except SourceError as error:
        found.update(dict.fromkeys(error.diagnostics))
    except DprobesError as error:
        found[Diagnostic(Severity.ERROR, error.message, program.spans.get("name"), hint=error.hint)] = None
    found.update(dict.fromkeys(diagnostics))


def word_at(text: str, offset: int) -> tuple[int, int]:
    """Return the start and end offsets of the word at an offset. They are equal if there is no word."""
    line = text.rfind("\n", 0, offset) + 1
    for match in _WORD.finditer(text, line):
        if match.start() > offset:
            break
        if offset <= match.end():
            return match.start(), match.end()
    return offset, offset


# The context of a position in a program: a comment, the place of a probe, or a block, and its probe.


_PIECE = re.compile(r'//[^\n]*|/\*.*?(?:\*/|\Z)|"(?:[^"\\\n]|\\.)*(?:"|(?=\n)|\Z)|[{};]', re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_PARAMETERS = re.compile(r"\(([^()]*(?:\([^()]*\)[^()]*)*)\)")
_TYPES = frozenset(("char", "short", "int", "long", "unsigned", "signed", "void", "size_t", "bool", "_Bool", "const"))


@dataclass(frozen=True, slots=True)
class Position:
    """
    A position in DProbes C.

    ``head`` is the text of the places and conditions before the enclosing block; outside of blocks, the text before the
    position. ``is_text`` is true within a comment or a string.
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
        """True if the probe is at a return."""
        return re.search(r"(?:^|,)\s*(?:\[[^\]]*\]\s*)?return\s", self.head) is not None

    @property
    def events(self) -> tuple[str, ...]:
        """The tracepoints and system calls of the probe, as ``tracepoint:SUBSYSTEM:NAME`` and ``syscall:NAME``."""
        found = re.findall(r"\b(tracepoint|syscall)\s+([\w:]+)", self.head)
        return tuple(f"{kind}:{name}" for kind, name in found)


def position_at(text: str, offset: int) -> Position:
    """
    Return the syntactic context of a character offset: inside a handler, in a header, in a comment or string.

    The text may be incomplete.
    """
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
