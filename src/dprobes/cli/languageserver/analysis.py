"""A program as an editor has it, perhaps unfinished: what is wrong about it, and what of it could be compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.diagnostics import Diagnostic, Diagnostics, Severity
from dprobes.errors import DprobesError, SourceError
from dprobes.lazydataclass import dataclass
from dprobes.lazypattern import lazy_pattern
from dprobes.rpn.pipeline import CompileOptions, parse_source
from dprobes.source import SourceFile

if TYPE_CHECKING:
    from dprobes.dpc.types.ctype import CType
    from dprobes.rpn.program import Program
    from dprobes.source import Span

__all__ = ["Analysis", "analyse", "is_c", "word_at"]

_WORD = lazy_pattern(r"[@$A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Analysis:
    """What was found out about a text: its programs, one for each module, as far as it has no errors of form."""

    source: SourceFile
    diagnostics: tuple[Diagnostic, ...]
    programs: tuple[Program, ...]
    types: tuple[tuple[Span, CType], ...] = ()
    """The types of expressions and parameters in DProbes C, in the order in which they were found."""


def is_c(name: str) -> bool:
    """Return whether a file of this name is in DProbes C."""
    return name.endswith(".dpc")


def analyse(name: str, text: str) -> Analysis:
    """
    Compile a text and look for its probepoints on this machine, as ``dprobes check`` does.

    ``name`` is the path of the file, whose directory has what is included. Nothing is raised for any text.
    """
    source = _source(name, text)
    diagnostics = Diagnostics()
    options = CompileOptions(allow_write=True)
    programs: tuple[Program, ...] = ()
    found: dict[Diagnostic, None] = {}
    types: list[tuple[Span, CType]] = []
    try:
        if is_c(name):
            from dprobes.api.sourcefile import parse_c

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
    from dprobes.dpc.cterms import in_c

    return SourceFile(name, text, wording=in_c)


def _resolve(program: Program, found: dict[Diagnostic, None]) -> None:
    from dprobes.resolve.localmodule import resolve_here

    diagnostics = Diagnostics()
    try:
        resolve_here(program, diagnostics, allow_write=True)
    except SourceError as error:
        found.update(dict.fromkeys(error.diagnostics))
    except DprobesError as error:
        found[Diagnostic(Severity.ERROR, error.message, program.spans.get("name"), hint=error.hint)] = None
    found.update(dict.fromkeys(diagnostics))


def word_at(text: str, offset: int) -> tuple[int, int]:
    """Return where the word at an offset begins and ends; the same number twice where there is none."""
    line = text.rfind("\n", 0, offset) + 1
    for match in _WORD.finditer(text, line):
        if match.start() > offset:
            break
        if offset <= match.end():
            return match.start(), match.end()
    return offset, offset
