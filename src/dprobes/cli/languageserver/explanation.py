"""Explanations for a position in a program: provided names, types, and for a probe its RPN code and costs."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from dprobes.cli.languageserver.edited_program import is_c, word_at
from dprobes.cli.languageserver.name_definition import definition_of
from dprobes.errors import DprobesError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.cli.languageserver.edited_program import Analysis
    from dprobes.dpc.types.c_types import CType
    from dprobes.rpn.rpn_program import ProbeDefinition, Program

__all__ = ["explain", "type_at"]

# The type of an expression in DProbes C, in the syntax of C, with the members of a structure.


_MEMBERS_MAX = 20
_TYPES_MAX = 4
"""Maximum number of types that are shown of an expression whose type differs by place."""


def type_at(analysis: Analysis, offset: int) -> str | None:
    """Return the type of the smallest expression at an offset, in Markdown, or None if there is none."""
    here = [
        (span.end - span.start, span, type_)
        for span, type_ in analysis.types
        if span.file is analysis.source and span.start <= offset < span.end
    ]
    if not here:
        return None
    smallest = min(size for size, _, _ in here)
    text = " ".join(next(span.text for size, span, _ in here if size == smallest).split())
    # The type of memory is recorded before that of the derived value: the address of an array or structure.
    types: dict[str, CType] = {}
    for size, _, type_ in here:
        if size == smallest:
            types.setdefault(str(type_), type_)
    shown = list(types.items())[: 1 if _is_whole(next(iter(types.values()))) else _TYPES_MAX]
    lines = [line for name, type_ in shown for line in (f"{name}  // {text}", *_members(type_))]
    return "\n".join(["```c", *lines, "```"])


def _is_whole(type_: CType) -> bool:
    from dprobes.dpc.types.c_types import Array, Record

    return isinstance(type_, Array | Record)


def _declared(type_: str, name: str) -> str:
    """Return a declaration in C syntax: ``char name[16]``, ``char *name``."""
    base, *sizes = type_.split(" [")
    pointed = f"{base}{'' if base.endswith('*') else ' '}{name}".rstrip()
    return pointed + "".join(f"[{size}" for size in reversed(sizes))


def _members(type_: CType) -> Iterator[str]:
    """Yield the known members of a structure, or of the structure that a pointer points to."""
    from dprobes.dpc.types.c_types import Pointer, Record

    record = type_.target if isinstance(type_, Pointer) else type_
    if not isinstance(record, Record):
        return
    try:
        members = record.members
    except DprobesError:
        return  # the debug information is damaged
    if members is None:
        return
    yield f"{record} {{"
    for member in members[:_MEMBERS_MAX]:
        bits = f" : {member.bits}" if member.bits is not None else ""
        yield f"    {_declared(str(member.type), member.name)}{bits};"
    if len(members) > _MEMBERS_MAX:
        yield f"    // and {len(members) - _MEMBERS_MAX} more"
    yield "};"


_LINES_MAX, _LINE_MAX = 60, 200
_COSTS_MAX = 10

Explanation = tuple[str, int, int]
"""Text in Markdown, and start and end of the explained text."""


def explain(analysis: Analysis, offset: int) -> Explanation | None:
    """Return the explanation of the probe or word at a character offset in the source; None if there is none."""
    text = analysis.source.text
    for program in analysis.programs:
        for definition in program.definitions:
            span = definition.span("offset")
            if span is not None and span.file is analysis.source and span.start <= offset < span.end:
                return _of_probe(program, definition), span.start, span.end
    start, end = word_at(text, offset)
    said = _of_c(text[start:end]) if is_c(analysis.source.name) else _of_rpn(text, start)
    said = said or _declaration(analysis.source.name, text, offset)
    if start < end and (typed := type_at(analysis, start)) is not None:
        said = "\n\n".join(filter(None, (typed, said)))
    return (said, start, end) if said else None


def _declaration(name: str, text: str, offset: int) -> str:
    """Return the line that defines the name at an offset, in Markdown, or an empty string if there is no definition."""
    found = definition_of(name, text, offset)
    if found is None:
        return ""
    line = text[text.rfind("\n", 0, found.start) + 1 :].partition("\n")[0].strip()
    return f"```c\n{line[:_LINE_MAX]}\n```"


def _of_probe(program: Program, definition: ProbeDefinition) -> str:
    from dprobes.rpn.program_text import print_program

    alone = replace(program, definitions=(definition,), procedures=())
    lines = print_program(alone).splitlines()
    shown = lines[:_LINES_MAX] + ([f"// and {len(lines) - _LINES_MAX} more lines"] if len(lines) > _LINES_MAX else [])
    parts = ["```", *shown, "```"]
    place = next((line.removeprefix("offset = ") for line in lines if line.startswith("offset = ")), "").strip('"')
    if costs := [f"| `{name}` | {cost} |" for name, cost in islice(_costs(program, definition, place), _COSTS_MAX)]:
        parts = ["| place | a hit |", "|---|---|", *costs, "", *parts]
    return "\n".join(parts)


def _costs(program: Program, definition: ProbeDefinition, place: str) -> Iterator[tuple[str, str]]:
    """
    Yield each function whose name matches ``place``, and the displayed cost of a hit at its start.

    Yield nothing if the module is not on this machine, or if the place is not the start of functions.
    """
    from dprobes.cli.output import module_listing
    from dprobes.resolve.probepoints import Space, space_of
    from dprobes.target.module_lookup import find_module
    from dprobes.target.probed_module import Module

    if not place or not definition.is_in_code or space_of(program) is not Space.MODULE or "+" in place:
        return
    with contextlib.suppress(DprobesError, OSError):
        if (path := find_module(program.name)) is not None:
            for row in module_listing.function_rows(Module.load(path, None), place):
                yield row[0], row[3]


def _of_c(word: str) -> str:
    from dprobes.dpc.typers.provided_names import ACTIONS, PROVIDED, RESERVED_CALLS

    if word in PROVIDED:
        return f"`{word}`: {PROVIDED[word].doc}"
    if word in ACTIONS:
        return f"`{word}` is a statement"
    return f"`{word}` {RESERVED_CALLS[word]}" if word in RESERVED_CALLS else ""


def _of_rpn(text: str, start: int) -> str:
    from dprobes.rpn.instruction_set import ROWS
    from dprobes.rpn.program_text import KEYWORDS

    begin = text.rfind("\n", 0, start) + 1
    end = text.find("\n", start)
    line = text[begin : end if end >= 0 else len(text)]
    statement = line.partition("//")[0][: start - begin].rpartition(";")[2] + line[start - begin :].partition(";")[0]
    word = statement.partition("//")[0].split("=")[0].strip()
    if "=" in statement:
        return next((f"`{each.name} =`: {each.doc}" for each in KEYWORDS if each.name == word), "")
    # The row with the most words in common with the instruction.
    fitting = [row for row in ROWS if f"{word} ".startswith(f"{row.syntax.partition(' <')[0]} ")]
    fitting = fitting or [row for row in ROWS if word and row.operator == word.split()[0]]
    if not fitting:
        return ""
    row = max(fitting, key=lambda each: len(each.syntax.partition(" <")[0]))
    return f"`{row.syntax}` ( {row.effect} ): {row.doc}"
