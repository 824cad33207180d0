"""
Which definitions of a program are inserted: those of certain groups, and of certain types.

A group binds stronger than a type (man page, "--group", "--type"): of all definitions in one of the groups those are
taken that have one of the types.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.diagnostics import Diagnostics, did_you_mean
from dprobes.rpn.program import MANY_PLACES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dprobes.rpn.program import Program

__all__ = ["select", "select_all", "without_opcodes"]


def select(program: Program, groups: Iterable[str] = (), types: Iterable[str] = ()) -> Program:
    """
    Return the program with the definitions of these groups and types only; without names all stay.

    Upper and lower case do not differ. Raise ``SourceError`` for an unknown name, and if nothing is left.
    """
    return select_all((program,), groups, types)[0]


def select_all(
    programs: Sequence[Program], groups: Iterable[str] = (), types: Iterable[str] = ()
) -> tuple[Program, ...]:
    """
    Return programs that were written as one with the definitions of these groups and types only, as ``select`` does.

    Some may have none left, but not all.
    """
    wanted_groups = tuple(dict.fromkeys(name.lower() for name in groups))
    wanted_types = tuple(dict.fromkeys(name.lower() for name in types))
    if not wanted_groups and not wanted_types:
        return tuple(programs)
    program = programs[0]  # all have the same names
    diagnostics = Diagnostics()
    for keyword, definer, wanted, known in (
        ("group", "groupdef", wanted_groups, program.groups),
        ("type", "typedef", wanted_types, program.types),
    ):
        _check_names(program, keyword, definer, wanted, known, diagnostics)
    diagnostics.raise_if_errors()
    chosen = tuple(_chosen(each, wanted_groups, wanted_types) for each in programs)
    if not any(each.definitions for each in chosen):
        names = [f"group {_listed(wanted_groups)}"] if wanted_groups else []
        names += [f"type {_listed(wanted_types)}"] if wanted_types else []
        diagnostics.error(program.spans.get("name"), f"no probe definition has {' and '.join(names)}")
        diagnostics.raise_if_errors()
    return chosen


def _chosen(program: Program, groups: Sequence[str], types: Sequence[str]) -> Program:
    definitions = tuple(
        definition
        for definition in program.definitions
        if (not groups or definition.group in groups) and (not types or not set(types).isdisjoint(definition.types))
    )
    return replace(program, definitions=definitions)


def _check_names(
    program: Program,
    keyword: str,
    definer: str,
    wanted: Sequence[str],
    known: Sequence[str],
    diagnostics: Diagnostics,
) -> None:
    for name in wanted:
        if name not in known:
            hint = did_you_mean(name, known)
            if hint is None:
                hint = f"there are: {', '.join(known)}" if known else f"the program has no '{definer} ='"
            span = program.spans.get(definer) or program.spans.get("name")
            diagnostics.error(span, f"the program has no {keyword} '{name}'", hint=hint)


def _listed(names: Sequence[str]) -> str:
    return " or ".join(f"'{name}'" for name in names)


def without_opcodes(program: Program) -> Program:
    """Return the program without ``opcode =``, except where that chooses among the matches of a pattern."""
    return replace(
        program,
        definitions=tuple(
            definition if isinstance(definition.location, MANY_PLACES) else replace(definition, opcode=None)
            for definition in program.definitions
        ),
    )
