"""The summary of a run: the counts of every probepoint, and the places without one."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.cli import console
from dprobes.engines.engine_interface import Counts
from dprobes.errors import TargetError
from dprobes.escapes import escaped
from dprobes.keyed.table_layout import key_parts, shown_value
from dprobes.rpn.instruction_set import ExceptionCode
from dprobes.rpn.keyed_tables import FAULTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dprobes.engines.engine_interface import Attachment, Scope
    from dprobes.keyed.table_layout import TableContents
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint
    from dprobes.rpn.rpn_program import Program

__all__ = ["advice_on_unreached", "fault_lines", "faulted_runs", "left_out_lines", "place_of", "summary"]

_SHOWN = 20
"""Maximum number of probepoints for which those without a hit are listed as well."""

_NAMED = 3
"""Maximum number of names in the summary for each reason to leave functions out."""

_MISSED = (
    "there was no room for one more at that moment, the processor ran a handler, the process was changing its "
    "mappings, or no breakpoint could be where a tail call returns to"
)

_PLACE = 1
"""Index of the column of places."""

_RARE = ("passed", "recursed")
"""Columns that are omitted if the table is too wide and they contain only zeros."""

_HEADER = ("probe", "place", "hits", "records", "lost", "passed", "recursed", "executed")


def summary(program: Program, session: Attachment, counts: Sequence[Counts], width: int | None = None) -> str:
    """
    Return a table of the probepoints in the order of their definitions, and of the definitions without any.

    It fits into ``width`` columns if possible.
    """
    probes = session.probes
    unused = _unused_files(probes, counts)
    # A place includes its file only if the same name occurs in several.
    paths = list(dict.fromkeys(probe.path for probe in probes if probe.path not in unused))
    used = [pair for pair in zip(probes, counts, strict=True) if pair[0].path not in unused]
    missing = set(range(len(program.definitions))) - {probe.number for probe in probes}
    lines = _lines(used, missing, with_paths=len(paths) > 1)
    codes = [f"{program.major},{definition.minor}" for definition in program.definitions]
    rows = [
        (
            codes[number],
            place,
            *(str(value) for value in (count.hits, count.records, count.lost, count.passed, count.recursed)),
            ", ".join(count.executed) or "-",
        )
        for number, place, count in lines
        if count.hits or len(lines) <= _SHOWN
    ]
    below = [_table(rows, paths if len(paths) > 1 else [], width)]
    if unused:
        below.append(f"nothing was hit in {escaped(', '.join(unused))}")
    if hidden := len(lines) - len(rows):
        below.append(f"and {f'{hidden} probepoints that were' if hidden > 1 else '1 probepoint that was'} not hit")
    for number, place, count in lines:
        below += [f"{codes[number]}  {remark}" for remark in _remarks(count, escaped(place))]
    for number, its_codes in enumerate(codes):
        mine = [left_out for left_out in session.left_out if left_out.number == number]
        below += [f"{its_codes}  {escaped(line)}" for line in left_out_lines(mine, names=_NAMED)]
    return "\n".join(below)


def _lines(
    used: Iterable[tuple[Probepoint, Counts]], missing: Iterable[int], *, with_paths: bool
) -> list[tuple[int, str, Counts]]:
    """Return definition, place and counts of each probepoint, and of the definitions without any."""
    lines = [
        (probe.number, f"{place_of(probe)} in {probe.path}" if with_paths else place_of(probe), count)
        for probe, count in used
    ]
    lines += [(number, "not resolved", Counts()) for number in missing]
    return sorted(lines, key=lambda line: line[0])


def _remarks(count: Counts, place: str) -> Iterator[str]:
    """Yield remarks about a probepoint below the table."""
    if count.missed:
        hits = f"{count.missed} hit{'s' if count.missed > 1 else ''}"
        yield f"{hits} of {place} ran no handler: {_MISSED}"
    if count.skipped:
        yield skipped_hits(count, place)
    if count.faulted:
        yield faulted_runs(count, place)


def _unused_files(probes: Sequence[Probepoint], counts: Sequence[Counts]) -> list[str]:
    """Return the files without hits, if another file has some."""
    paths = dict.fromkeys(probe.path for probe in probes)
    if len(paths) < 2:
        return []
    used = {probe.path for probe, count in zip(probes, counts, strict=True) if replace(count, executed=()) != Counts()}
    return [path for path in paths if path not in used] if used else []


def _table(rows: Sequence[tuple[str, ...]], paths: Sequence[str], width: int | None) -> str:
    """
    Return the table; if it is too wide, without columns of zeros, and with the files below it.

    If it is still too wide, places are on lines of their own.
    """
    text = console.table(_HEADER, rows)
    if width is None or _width(text) <= width:
        return text
    kept = [n for n, name in enumerate(_HEADER) if name not in _RARE or any(row[n] != "0" for row in rows)]
    header = [_HEADER[n] for n in kept]
    narrow = [[row[n] for n in kept] for row in rows]
    below = ""
    for number, path in enumerate(paths, 1):
        below += f"\n[{number}] {escaped(path)}"
        for row in narrow:
            if row[_PLACE].endswith(f" in {path}"):
                row[_PLACE] = f"{row[_PLACE].removesuffix(f' in {path}')} [{number}]"
    text = console.table(header, narrow)
    over = _width(text) - width
    if over <= 0:
        return text + below
    return _with_places_above(header, narrow, over) + below


def _with_places_above(header: Sequence[str], narrow: Sequence[Sequence[str]], over: int) -> str:
    """Return a table that is ``over`` columns too wide, with long places on lines of their own."""
    room = max(max(len(row[_PLACE]) for row in narrow) - over, len("place"))
    is_long = [len(row[_PLACE]) > room for row in narrow]
    cells = [["", "", *row[_PLACE + 1 :]] if long else row for row, long in zip(narrow, is_long, strict=True)]
    head, *lines = console.table(header, cells).splitlines()
    broken = [f"{row[0]}  {escaped(row[_PLACE])}\n" if long else "" for row, long in zip(narrow, is_long, strict=True)]
    return "\n".join([head, *(place + line for place, line in zip(broken, lines, strict=True))])


def _width(text: str) -> int:
    return max(map(len, text.splitlines()))


def faulted_runs(counts: Counts, place: str) -> str:
    """Return the remark about handler runs without a record because of a fault."""
    runs = f"{counts.faulted} handler run{'s' if counts.faulted > 1 else ''}"
    return f"{runs} at {place} left no record, because the instruction faulted"


def skipped_hits(counts: Counts, place: str) -> str:
    """Return the remark about hits whose handlers were skipped to save time."""
    hits = f"{counts.skipped} hit{'s' if counts.skipped > 1 else ''}"
    return f"{hits} of {place} ran no handler: more would have taken too much of a CPU (--overhead)"


def place_of(probe: Probepoint) -> str:
    """Return the displayed place of a probepoint."""
    return f"{probe.where} (return)" if probe.at_return else probe.where


def left_out_lines(left_out: Sequence[LeftOutProbe], *, names: int | None) -> Iterator[str]:
    """Iterate over lines with the functions left out by reason, each reason with up to ``names`` names."""
    by_reason: dict[str, list[str]] = {}
    for each in left_out:
        by_reason.setdefault(each.reason, []).append(each.name)
    for reason, found in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0])):
        listed = ", ".join(found if names is None else found[:names])
        more = f" and {len(found) - names} more" if names is not None and len(found) > names else ""
        yield f"left out {len(found)}, because {reason}: {listed}{more}"


# The exceptions that ended hits, by the lines of the program in DProbes C that they came from.

_REASONS = {
    ExceptionCode.INVALID_ADDR: "memory that is not there",
    ExceptionCode.DIVIDE_BY_ZERO: "a division by zero",
    ExceptionCode.JMP_MAX: "more jumps than jmpmax allows",
    ExceptionCode.CALL_MAX: "calls nested too deep",
    ExceptionCode.INVALID_OPERAND: "an index that the array does not have",
    ExceptionCode.SEG_FAULT: "a segment that is not there",
}

_ENTRIES = ("push entry", "push elapsed")
"""Instructions that raise INVALID_ADDR also if the entry of the call was not seen."""


def fault_lines(program: Program, tables: Sequence[TableContents]) -> Iterator[str]:
    """Iterate over lines with the number of hits ended by an exception, by line of the program."""
    contents = next((each for each in tables if each.table.name == FAULTS), None)
    if contents is None:
        return
    span = program.spans.get("name")
    name = span.file.name if span is not None else program.name
    reasons = dict(_REASONS)
    if any(each.row.syntax.startswith(_ENTRIES) for code in program.bodies() for each in code.instructions):
        reasons[ExceptionCode.INVALID_ADDR] += ", or an entry that was not seen"
    found = []
    for row in contents.rows:
        code, line = key_parts(contents.table.keys, row.key)
        assert isinstance(code, int)
        assert isinstance(line, int)
        found.append((line, code, shown_value(contents.table, row.cells)))
    for line, code, count in sorted(found):
        try:
            known = ExceptionCode(code)
            reason = reasons.get(known, known.name)
        except ValueError:
            reason = f"exception {code:#x}"
        yield f"{count} fault{'s' if count != 1 else ''} at {name}:{line}: {reason}"


# Advice if probepoints were inserted and never reached: what did run, and what was probably intended. That is another
# program, another library's function of the same name, or code that the compiler has moved elsewhere.

_LOOKED_UP_MAX, _FUNCTIONS_MAX = 256, 8
"""Maximum numbers of functions that are searched in other files, and in the debug information."""

_START = re.compile(r"(?P<name>[A-Za-z_][\w.$]*)", re.ASCII)
"""The start of a function, in the ``where`` of a probepoint."""


def advice_on_unreached(probes: Sequence[Probepoint], scope: Scope, mapped: Mapping[str, str]) -> str | None:
    """
    Return the probable reason why nothing was reached; None if nothing helpful is known.

    ``mapped`` are the files that processes in scope mapped as code, if the engine reports them: names and paths.
    """
    paths = list(dict.fromkeys(probe.path for probe in probes if probe.is_in_code))
    if not paths:
        return None
    return _on_command(paths, scope.command) or _on_functions(probes, scope, mapped)


def _on_command(paths: Sequence[str], command: Sequence[str]) -> str | None:
    """Return the file that a command executes, if that is not the probed one."""
    if not command:
        return None
    from dprobes.target.module_lookup import executable_of

    try:
        program = executable_of(command[0])
    except TargetError:
        return None
    if any(_is_same(path, program) for path in paths):
        return None
    started = shutil.which(command[0]) or command[0]
    script = "" if _is_same(started, program) else f" for the script '{started}'"
    executes = f"the command executes '{program}'{script}"
    if not any(".so" in os.path.basename(path) for path in paths):  # noqa: PTH119 - text
        return f"{executes}, and the probepoints are in {_quoted(paths)}; what else it starts is probed as well"
    from dprobes.target.probed_module import linked_files

    linked = linked_files(program)
    if any(_is_same(path, other) for path in paths for other in linked.values() if other is not None):
        return None
    names = {Path(path).name for path in paths}
    others = [str(other) for name, other in linked.items() if name in names and other is not None]
    if others:
        return f"{executes}, which is linked with {_quoted(others)}"
    return f"{executes}, which is not linked with {_quoted(paths)}"


def _on_functions(probes: Sequence[Probepoint], scope: Scope, mapped: Mapping[str, str]) -> str | None:
    """Return other places of the probed functions."""
    starts = [(probe.path, _START.fullmatch(probe.where)) for probe in probes if probe.is_in_code]
    functions = list(dict.fromkeys((path, start["name"]) for path, start in starts if start is not None))
    if not functions:
        return None
    advice = list(_in_others(functions[:_LOOKED_UP_MAX], list(_loaded(scope, mapped))))
    for path, name in functions if len(functions) <= _FUNCTIONS_MAX else ():
        advice += _elsewhere(path, name)
    return "; ".join(dict.fromkeys(advice)) or None


def _in_others(functions: Sequence[tuple[str, str]], loaded: Sequence[Path]) -> Iterator[str]:
    """Yield the functions that other files have, too."""
    from dprobes.target.probed_module import providers_of

    names_in: dict[tuple[Path, ...], list[str]] = {}
    for path in dict.fromkeys(path for path, _ in functions):
        others = [each for each in loaded if not _is_same(path, each)]
        for name, files in providers_of([name for its, name in functions if its == path], others).items():
            names_in.setdefault(tuple(files), []).append(name)
    probed = {Path(path).name for path, _ in functions}
    for those, names in names_in.items():
        written = str(those[0]) if those[0].name in probed else those[0].name
        what = f"{_quoted(names)} {'is' if len(names) == 1 else 'are'} in {_quoted([str(each) for each in those])}"
        yield f"{what}, too, which may be called instead: probe '{written}:{names[0]}'"


def _elsewhere(path: str, name: str) -> Iterator[str]:
    """Yield the places of a function's code that the compiler has moved elsewhere."""
    from dprobes.resolve.breakpoints import inlined_places
    from dprobes.target.module_symbols import clones_in, is_cold_part
    from dprobes.target.probed_module import Module

    try:
        module = Module.load(path)
        clones = [each for each in clones_in(module.symbols, name) if not is_cold_part(each)]
        places = inlined_places(module, name)
    except TargetError:
        return
    file = Path(path).name
    if clones:
        yield f"the compiler has made {_quoted(clones)} of '{name}' for some of its calls: probe '{file}:{clones[0]}'"
    if places:
        yield f"calls of '{name}' were inlined, at {_listed(places)}: 'inline {file}:{name}' probes them"


def _loaded(scope: Scope, mapped: Mapping[str, str]) -> Iterator[Path]:
    """Yield the files that a process of the run has mapped as code, or is linked with."""
    from dprobes.target.module_lookup import root_of
    from dprobes.target.probed_module import linked_files, preloaded_files
    from dprobes.target.process_maps import code_mappings

    yield from map(Path, mapped.values())
    if scope.pid is not None and scope.endpoint is None:
        with contextlib.suppress(TargetError):  # it has ended
            root = root_of(scope.pid)
            yield from (Path(root + each.path) for each in code_mappings(scope.pid)[0] if each.is_file)
    elif scope.command and not mapped:
        from dprobes.target.module_lookup import executable_of

        with contextlib.suppress(TargetError):
            program = executable_of(scope.command[0])
            yield program
            yield from preloaded_files(os.environ)
            yield from (path for path in linked_files(program).values() if path is not None)


def _listed(places: Sequence[str]) -> str:
    more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
    return ", ".join(places[:_NAMED]) + more


def _quoted(paths: Sequence[str]) -> str:
    return _listed([f"'{path}'" for path in paths])


def _is_same(path: str | os.PathLike[str], other: Path) -> bool:
    with contextlib.suppress(OSError):
        return Path(path).samefile(other)
    return False
