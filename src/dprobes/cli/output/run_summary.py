"""The summary of a run: the counts of every probepoint, and the places without one."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dprobes.cli import console
from dprobes.engines.engine_interface import Counts
from dprobes.engines.engine_registry import rows as engine_rows
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

__all__ = [
    "SummaryOptions",
    "advice_on_unreached",
    "fault_lines",
    "faulted_runs",
    "left_out_lines",
    "neighbour_writes",
    "place_of",
    "summary",
    "words_of_ways",
]

_SHOWN = 20
"""Maximum number of probepoints for which those without a hit are listed as well."""

_NAMED = 3
"""Maximum number of names in the summary for each reason to leave functions out."""

_MISSED = (
    "too many were in progress, the CPU was running a handler, the process was changing its mappings, or a "
    "tail call returned to a place where no breakpoint can be"
)

_PLACE = 1
"""Index of the column of places."""

_RARE = frozenset({"passed"})
"""Columns that are omitted if they contain only zeros."""

_ROWS = 50
"""Maximum number of rows, unless ``--rows`` gives another one."""

_COLUMNS = ("probe", "place", "hits", "records", "lost", "passed")

_COLUMN_LEGEND = {
    "hits": "how often a thread came to the probepoint, whether or not the handler ran",
    "records": "records that handlers have logged",
    "lost": "records that were dropped, because they were not read in time",
    "passed": "hits that 'passcount' skipped",
}

_WORDS = {
    "in a page": "breakpoint",
    "in padding": "breakpoint",
    "in place": "single-stepped",
}
"""Words of the summary for the engines' terms; other terms are printed unchanged."""

_WORD_LEGEND = {
    "jump": "a jump leads to the handler, which runs in the process itself",
    "breakpoint": "a breakpoint stops the thread; a copy of the probed instruction is executed elsewhere",
    "emulated": "a breakpoint stops the thread; the probed instruction is emulated, without another stop",
    "single-stepped": "a breakpoint stops the thread; the probed instruction is executed by a single step",
    "uretprobe": "the kernel replaces the return address; a breakpoint there runs the handler",
    "kprobe": "the kernel calls the handler at one of its instructions",
    "kretprobe": "the kernel replaces the return address of one of its functions",
    "ftrace": "the kernel calls the handler at the start of a function, without a breakpoint",
    "ftrace return": "the kernel calls the handler at the return of a function, without a breakpoint",
    "fentry": "a BPF trampoline calls the handler at the start of a function of the kernel",
    "fexit": "a BPF trampoline calls the handler at the return of a function of the kernel",
    "fmod_ret": "a BPF trampoline calls the handler, which may skip the function of the kernel",
    "tracepoint": "the kernel calls the handler at one of its tracepoints",
    "protected page": "a write to its page makes the thread wait; it is executed while all other threads are stopped",
    "debug register": "the processor stops the thread at an access to watched memory",
    "clock": "a timer of each CPU calls the handler",
    "at least": "the counts are lower bounds: the stub does not report every hit",
}


class SummaryOptions(NamedTuple):
    """
    The options of the summary of a run.

    The last column is titled with the ``engine``, and shows its work at each probepoint in one word. Of more than
    ``rows`` rows those with the most hits are printed. With ``explain`` the summary has all rows with hits, all columns
    and the engine's own terms, and a legend. ``names`` maps minor codes to the names of probes, which are printed
    instead of codes.
    """

    engine: str
    rows: int | None = None
    explain: bool = False
    names: Mapping[int, str] = {}


def summary(
    program: Program,
    session: Attachment,
    counts: Sequence[Counts],
    options: SummaryOptions,
    width: int | None = None,
) -> str:
    """
    Return a table of the probepoints in the order of their definitions, and of the definitions without any.

    ``counts`` has the counts of the session's probepoints. The table fits into ``width`` columns if possible, unless
    that is None.
    """
    rows, explain = options.rows, options.explain
    probes = session.probes
    unused = _unused_files(probes, counts)
    # A place includes its file only if the same name occurs in several.
    paths = list(dict.fromkeys(probe.path for probe in probes if probe.path not in unused))
    used = [pair for pair in zip(probes, counts, strict=True) if pair[0].path not in unused]
    missing = set(range(len(program.definitions))) - {probe.number for probe in probes}
    lines = _lines(used, missing, with_paths=len(paths) > 1)
    codes = [
        options.names.get(definition.minor) or f"{program.major},{definition.minor}"
        for definition in program.definitions
    ]
    shown = _cut(lines, rows or (len(lines) if explain else _ROWS))
    header: tuple[str, ...] = (*_COLUMNS, f"{options.engine} engine")
    cells: list[tuple[str, ...]] = [
        (
            codes[number],
            place,
            *(str(value) for value in (count.hits, count.records, count.lost, count.passed)),
            ", ".join(count.executed if explain else words_of_ways(count.executed)) or "-",
        )
        for number, place, count in shown
    ]
    if not explain:
        header, cells = _without_zeros(header, cells)
    below = [_table(header, cells, paths if len(paths) > 1 else [], width)]
    below += _left_out_rows(lines, shown)
    if unused:
        idle = sum(probe.path in unused for probe in probes)
        below.append(f"and {_unhit(idle, f'{len(unused)} other files' if len(unused) > 1 else escaped(unused[0]))}")
    for number, place, count in lines:
        below += [f"{codes[number]}  {remark}" for remark in _remarks(count, escaped(place))]
    for number, its_codes in enumerate(codes):
        mine = [left_out for left_out in session.left_out if left_out.number == number]
        below += [f"{its_codes}  {escaped(line)}" for line in left_out_lines(mine, names=_NAMED)]
    if explain:
        below += _legend(count for _, _, count in lines)
    return "\n".join(below)


def _cut(lines: Sequence[_Line], rows: int) -> list[_Line]:
    """Return up to ``rows`` lines, those with the most hits, in their order; of many lines none without a hit."""
    found = [line for line in lines if line[2].hits or len(lines) <= _SHOWN]
    if len(found) <= rows:
        return found
    ranks = sorted(range(len(found)), key=lambda n: -found[n][2].hits)[:rows]
    return [found[n] for n in sorted(ranks)]


def _left_out_rows(lines: Sequence[_Line], shown: Sequence[_Line]) -> Iterator[str]:
    """Iterate over lines about the rows of ``lines`` that are not in ``shown``: their number, and how many had hits."""
    hits = sum(count.hits for _, _, count in lines) - sum(count.hits for _, _, count in shown)
    idle = sum(not count.hits for _, _, count in lines) - sum(not count.hits for _, _, count in shown)
    if busy := len(lines) - len(shown) - idle:
        probepoints = f"{busy} more probepoint{'s' if busy > 1 else ''}"
        yield f"and {probepoints} with {hits} hit{'s' if hits > 1 else ''} (--rows N prints more)"
    if idle:
        yield f"and {_unhit(idle)}"


def _unhit(count: int, files: str = "") -> str:
    """Return the phrase for ``count`` probepoints without a hit; ``files`` is the text with their files, or empty."""
    place = f" in {files}" if files else ""
    return f"{count} probepoints{place} that were not hit" if count > 1 else f"1 probepoint{place} that was not hit"


def words_of_ways(ways: Iterable[str]) -> list[str]:
    """Return the summary's words for the ways in which an engine handles hits."""
    return list(dict.fromkeys(_word(way) for way in ways))


def _word(way: str) -> str:
    term = re.split(r" \(|: ", way, maxsplit=1)[0]
    if any(row.name == term and row.speedup is not None for row in engine_rows()):
        return "jump"
    return _WORDS.get(term, term)


def _legend(counts: Iterable[Counts]) -> Iterator[str]:
    """Yield an explanation of each column, and of each of the engine's terms in the last one."""
    ways = list(dict.fromkeys(way for count in counts for way in count.executed))
    legend = {**_COLUMN_LEGEND, **{way: _WORD_LEGEND[_word(way)] for way in ways if _word(way) in _WORD_LEGEND}}
    width = max(map(len, legend))
    yield ""
    for name, meaning in legend.items():
        word = f"{_word(name)}: " if _word(name) != name else ""
        yield f"{name:<{width}}  {word}{meaning}"


_Line = tuple[int, str, Counts]
"""The definition's number, the place and the counts of a probepoint."""


def _lines(used: Iterable[tuple[Probepoint, Counts]], missing: Iterable[int], *, with_paths: bool) -> list[_Line]:
    """
    Return the index of the definition, place and counts of each probepoint in ``used``, sorted by definition.

    ``missing`` are indices of definitions without a probepoint; ``with_paths`` adds file names to the places.
    """
    lines = [
        (probe.number, f"{place_of(probe)} in {probe.path}" if with_paths else place_of(probe), count)
        for probe, count in used
    ]
    lines += [(number, "not resolved", Counts()) for number in missing]
    return sorted(lines, key=lambda line: line[0])


def _remarks(count: Counts, place: str) -> Iterator[str]:
    """
    Yield lines to print below the table: the reasons for missed, skipped and faulted hits, and foreign writes.

    ``place`` is the displayed place of the probepoint with these counts.
    """
    if count.missed:
        hits = f"{count.missed} hit{'s' if count.missed > 1 else ''}"
        yield f"{hits} of {place} ran no handler: {_MISSED}"
    if count.skipped:
        yield skipped_hits(count, place)
    if count.faulted:
        yield faulted_runs(count, place)
    if count.neighbours:
        yield neighbour_writes(count, place)


def _unused_files(probes: Sequence[Probepoint], counts: Sequence[Counts]) -> list[str]:
    """Return the files without hits; none if no file has hits."""
    paths = dict.fromkeys(probe.path for probe in probes)
    if len(paths) < 2:
        return []
    used = {probe.path for probe, count in zip(probes, counts, strict=True) if replace(count, executed=()) != Counts()}
    return [path for path in paths if path not in used] if used else []


def _without_zeros(
    header: tuple[str, ...], rows: Sequence[tuple[str, ...]]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and rows without those of the rarely used columns that contain only zeros."""
    kept = [n for n, name in enumerate(header) if name not in _RARE or any(row[n] != "0" for row in rows)]
    return tuple(header[n] for n in kept), [tuple(row[n] for n in kept) for row in rows]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], paths: Sequence[str], width: int | None) -> str:
    """
    Return the lines of the table as one string. If they exceed ``width``, file paths are on lines below the table.

    If the lines are still too wide, places are on lines of their own. If ``width`` is None, there is no limit.
    """
    text = console.table(header, rows)
    if width is None or _width(text) <= width:
        return text
    narrow = [list(row) for row in rows]
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
    """Return the remark about handler runs of a probepoint whose instruction faulted, so that no record was kept."""
    runs = f"{counts.faulted} handler run{'s' if counts.faulted > 1 else ''}"
    return f"{runs} at {place} left no record, because the instruction faulted"


def neighbour_writes(counts: Counts, place: str) -> str:
    """Return the remark about writes to the page of a watchpoint that stopped the threads without a hit."""
    writes = f"{counts.neighbours} write{'s' if counts.neighbours > 1 else ''}"
    return f"{writes} to the pages of {place} did not touch it, and stopped all threads (neighbours)"


def skipped_hits(counts: Counts, place: str) -> str:
    """Return the remark about hits whose handlers were skipped to save time."""
    hits = f"{counts.skipped} hit{'s' if counts.skipped > 1 else ''}"
    return f"{hits} of {place} ran no handler: more would have taken too much of a CPU (--overhead)"


def place_of(probe: Probepoint) -> str:
    """Return the place of a probepoint as displayed, with ``(return)`` after that of a return probe."""
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


# Advice if probepoints were inserted and never reached: the code that was probably executed instead. It is another
# program, another library's function of the same name, or code that the compiler has moved elsewhere.

_LOOKED_UP_MAX, _FUNCTIONS_MAX = 256, 8
"""Maximum numbers of functions that are searched in other files, and in the debug information."""

_START = re.compile(r"(?P<name>[A-Za-z_][\w.$]*)", re.ASCII)
"""The start of a function, in the ``where`` of a probepoint."""


def advice_on_unreached(probes: Sequence[Probepoint], scope: Scope, mapped: Mapping[str, str]) -> str | None:
    """
    Return the probable reason why nothing was reached, or None if nothing helpful is known.

    ``mapped`` are the files that processes in scope mapped as code, if the engine reports them: names and paths.
    """
    paths = list(dict.fromkeys(probe.path for probe in probes if probe.is_in_code))
    if not paths:
        return None
    return _on_command(paths, scope.command) or _on_functions(probes, scope, mapped)


def _on_command(paths: Sequence[str], command: Sequence[str]) -> str | None:
    """Return a clause about the file that a command executes, if it is not a probed one, or None if it is."""
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
        return f"{executes}, and the probepoints are in {_quoted(paths)}; programs that it starts are probed as well"
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
    """
    Return advice about other places and files in which the probed functions are defined.

    Return None if none is known.
    """
    starts = [(probe.path, _START.fullmatch(probe.where)) for probe in probes if probe.is_in_code]
    functions = list(dict.fromkeys((path, start["name"]) for path, start in starts if start is not None))
    if not functions:
        return None
    advice = list(_in_others(functions[:_LOOKED_UP_MAX], list(_loaded(scope, mapped))))
    for path, name in functions if len(functions) <= _FUNCTIONS_MAX else ():
        advice += _elsewhere(path, name)
    return "; ".join(dict.fromkeys(advice)) or None


def _in_others(functions: Sequence[tuple[str, str]], loaded: Sequence[Path]) -> Iterator[str]:
    """
    Yield advice about functions that other files define, too.

    ``functions`` has pairs of path and name. ``loaded`` has the files that processes of the run have mapped.
    """
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
    """Yield advice about a function's clones, and about the places where its calls were inlined."""
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
