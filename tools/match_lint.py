"""
Find ``case _`` in a ``match`` over the members of an enumeration or the classes of a union of the project.

A member that is added later would silently match it, while ``assert_never`` makes mypy report the place. Such a ``case
_`` is therefore refused unless it calls ``assert_never``, or raises an error. ``EXCUSED`` lists the functions whose
``case _`` is meant for all other members, present and future, each with its reason.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "dprobes"

EXCUSED: dict[str, tuple[int, str]] = {
    "bpftrace/statement_writer.py:_map": (1, "Whatever else a map keeps is refused."),
    "dpc/emitters/cell_emitter.py:cells": (1, "All other parts are values, which exact() takes."),
    "dpc/emitters/statement_emitter.py:_make_room": (1, "Any other statement ends the search."),
    "dpc/emitters/statement_emitter.py:statement": (1, "All others are simple, which _simple() has by its type."),
    "dpc/emitters/value_emitter.py:effect": (1, "All other values are computed and dropped."),
    "dpc/emitters/value_emitter.py:branch": (1, "All other conditions are numbers, compared with 0."),
    "dpc/modules/debug_names.py:_argument_on_stack": (1, "All other addresses are of no argument."),
    "dpc/typers/name_typer.py:part": (1, "Members of all other values are in memory."),
    "engines/attachment_group.py:_given": (1, "All other events are passed on as they are."),
    "engines/inline/entry_index.py:_walk_part": (1, "The rest is an end of the walk, with or without damage."),
    "engines/ptrace/client/left_removal.py:note": (1, "All other messages are for the restorer."),
    "engines/ptrace/client/tracer_conversation.py:_on_message": (1, "All other messages are for the restorer."),
    "filters/handler_filter.py:push": (1, "All other values are no numbers, and refused."),
    "formatters/templates/data_columns.py:steps_of": (1, "All other parts are read singly."),
    "formatters/templates/data_extraction.py:compiled_of": (1, "All other parts are read singly."),
    "native/a64/a64_operations.py:alu": (1, "All other operations are one instruction of a table."),
    "native/a64/a64_operations.py:atomic": (1, "All other operations are one instruction of a table."),
    "native/x86/x86_operations.py:alu": (1, "All other operations are one instruction of a table."),
    "platform/x86/patches/displaced_code.py:add": (1, "The enumeration is another library's."),
    "rpn/operands.py:_operand": (1, "All other operands are constants, whose bounds their kind has."),
    "testing.py:_offset": (1, "All other places have no offset."),
    "trace/trace_reader.py:_of_frame": (1, "A frame of a later version is skipped, as trace-file.md promises."),
}
"""Functions as ``file:function``: the number of ``case _`` that are meant for all other members, and the reason."""


def names_of(pattern: ast.pattern) -> Iterator[str | None]:
    """
    Iterate over the classes that the alternatives of a pattern name, or whose members they name.

    An alternative that names neither yields None.
    """
    match pattern:
        case ast.MatchOr(patterns=patterns):
            for each in patterns:
                yield from names_of(each)
        case ast.MatchAs(pattern=ast.pattern() as inner):
            yield from names_of(inner)
        case ast.MatchClass(cls=ast.Name(id=name)) | ast.MatchValue(value=ast.Attribute(value=ast.Name(id=name))):
            yield name
        case ast.MatchClass(cls=ast.Attribute(attr=name)):
            yield name
        case _:
            yield None


BUILT_IN = frozenset(("bool", "bytes", "dict", "float", "int", "list", "str", "tuple"))


def is_closed(statement: ast.Match) -> bool:
    """Return whether all cases of a statement name classes or members, so that the set of values is closed."""
    named = [case for case in statement.cases if not is_rest(case)]
    names = {name for case in named for name in names_of(case.pattern)}
    return bool(named) and not names & (BUILT_IN | {None})


def is_rest(case: ast.match_case) -> bool:
    """Return whether a case matches all remaining values."""
    return isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None and case.guard is None


def is_checked(case: ast.match_case) -> bool:
    """Return whether a case rejects its values, by ``assert_never`` or by an error."""
    first = case.body[0]
    return isinstance(first, ast.Raise) or (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Call)
        and isinstance(first.value.func, ast.Name)
        and first.value.func.id == "assert_never"
    )


def places(path: Path) -> Iterator[tuple[int, str]]:
    """Iterate over the lines of unchecked ``case _`` in a file, each with its innermost function."""
    waiting: list[tuple[ast.AST, str]] = [(ast.parse(path.read_text(encoding="utf-8")), "")]
    while waiting:
        node, function = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Match) and is_closed(node):
            rest = [case for case in node.cases if is_rest(case) and not is_checked(case)]
            yield from ((case.pattern.lineno, function) for case in rest)
        waiting += [(child, function) for child in reversed([*ast.iter_child_nodes(node)])]


def problems_in(found: Mapping[str, Sequence[int]], excused: Mapping[str, tuple[int, str]]) -> Iterator[str]:
    """
    Iterate over messages about functions with more or fewer cases than are excused.

    ``found`` has the lines of cases by function, ``excused`` their numbers and reasons.
    """
    for name, lines in found.items():
        allowed, _ = excused.get(name, (0, ""))
        if len(lines) > allowed:
            shown = ", ".join(map(str, lines))
            yield f"{name} (lines {shown}): {allowed} 'case _' excused, {len(lines)} take members and classes to come"
    for name, (count, _) in excused.items():
        if len(found.get(name, ())) < count:
            yield f"{name}: {count} 'case _' excused, {len(found.get(name, ()))} found"


def main() -> int:
    """Print each function with more or fewer cases than are excused; return 1 if there is one."""
    found: dict[str, list[int]] = {}
    for path in sorted(SOURCES.rglob("*.py")):
        for line, function in places(path):
            found.setdefault(f"{path.relative_to(SOURCES)}:{function}", []).append(line)
    problems = list(problems_in(found, EXCUSED))
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
