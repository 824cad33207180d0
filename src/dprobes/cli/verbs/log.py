"""The verb ``log``: the contents of trace files, by default the manager's."""

from __future__ import annotations

import datetime as dt
import re
import select
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from dprobes.cli import console
from dprobes.cli.console import Progress
from dprobes.cli.output.record_printer import DamageReport, Printer, skip_damaged_option, warn_of_all
from dprobes.cli.output.stack_profiles import stacks_of
from dprobes.cli.record_options import read_templates, templates_option
from dprobes.cli.shared_options import PROGRAM_FILE, WantedFields, stacks_options, sum_options
from dprobes.errors import FormatError
from dprobes.formatters import FORMATS
from dprobes.trace.trace_content import LostRecords
from dprobes.trace.trace_filter import Selection, compile_filter, program_filter, time_filter
from dprobes.trace.trace_reader import MissingPart, TraceFollower
from dprobes.trace.trace_writer import older_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from dprobes.cli.output.stack_profiles import StacksOptions
    from dprobes.formatters.templates.template_collection import Templates
    from dprobes.sinks.field_columns import RecordData
    from dprobes.trace.packed_blocks import Block
    from dprobes.trace.trace_content import Damage, TraceRecord, TraceTables
    from dprobes.trace.trace_filter import RowFilter

__all__ = ["TIME_FORMS", "log_command", "parse_time"]

# Times and durations, in the form of ``dprobes log --since`` and ``--until``.


TIME_FORMS = "10m, 14:30, '2026-11-22 14:30:05.5', @1763785600, start+5s or end-10m"
"""The forms of a time, for messages."""

Anchor = tuple[int, int] | None
"""The times of writing of the first and the last record."""

_UNITS = {"ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "d": 86400 * 10**9}
_SPAN = r"(?:\d+(?:\.\d+)?(?:ms|[smhd]))+"
_PART = re.compile(r"(\d+)(?:\.(\d+))?(ms|[smhd])")
_ANCHORED = re.compile(rf"(start|end|now)(?:([+-])({_SPAN}))?\Z")
_SECONDS = re.compile(r"@(\d{1,12})(?:\.(\d{1,9}))?\Z")
_TIME_OF_DAY = re.compile(r"\d\d?:\d\d(?::\d\d(?:\.\d+)?)?\Z")


def needs_bounds(text: str) -> bool:
    """Return whether a time is relative to the start or the end of the records."""
    return text.startswith(("start", "end"))


def parse_time(text: str, *, now: int, bounds: Anchor = None) -> int:
    """
    Return a time in nanoseconds since 1970; raise ``ValueError`` if ``text`` is invalid.

    ``10m`` is ten minutes before ``now``. ``bounds`` are the times called "start" and "end", None for ``now``. A time
    without a zone is local, one without a date is of today.
    """
    text = text.strip()
    if re.fullmatch(_SPAN, text):
        return now - _span(text)
    if match := _ANCHORED.match(text):
        name, sign, span = match.groups()
        start, end = bounds or (now, now)
        base = {"start": start, "end": end, "now": now}[name]
        return base + (0 if span is None else _span(span) * (1 if sign == "+" else -1))
    if match := _SECONDS.match(text):
        return int(match[1]) * 10**9 + int((match[2] or "").ljust(9, "0"))
    if _TIME_OF_DAY.match(text):
        today = dt.datetime.fromtimestamp(now // 10**9).astimezone().date()
        text = f"{today.isoformat()} {text if text.index(':') == 2 else f'0{text}'}"
    when = dt.datetime.fromisoformat(text).astimezone()
    whole = when.replace(microsecond=0)
    return int(whole.timestamp()) * 10**9 + when.microsecond * 1000


def _span(text: str) -> int:
    return sum(
        (int(whole) * 10 ** len(fraction) + int(fraction or 0)) * _UNITS[unit] // 10 ** len(fraction)
        for whole, fraction, unit in _PART.findall(text)
    )


_INTERVAL = 0.1
"""Seconds between two checks for more records."""


@dataclass(frozen=True, slots=True)
class _LogOptions:
    """The values of the command-line options of ``dprobes log``."""

    files: tuple[Path, ...]
    follow: bool
    filters: tuple[str, ...]
    name: str | None
    since: str | None
    until: str | None
    head: int | None
    tail: int | None
    total: bool
    counted: tuple[str, ...]
    only_tables: bool
    measured: tuple[str, ...]
    summed: tuple[str, ...]
    by: tuple[str, ...]
    stacks: str | None
    weight: str | None
    baseline: Path | None
    format_name: str
    templates: Path | None
    skip_damaged: bool


@click.command("log")
@click.argument("files", type=PROGRAM_FILE, nargs=-1, metavar="[FILE ...]")
@click.option("-f", "--follow", is_flag=True, help="Wait for new records, until Ctrl-C.")
@click.option(
    "--filter",
    "filters",
    multiple=True,
    metavar="CONDITION",
    help="Print only records that match, such as 'major == 1 and name =~ \"ssh*\"'.",
)
@click.option("--name", metavar="NAME", help="Print only records of the program of this name.")
@click.option(
    "--since", metavar="TIME", help="Print only records from this time on: 10m (ago), 14:30, a date and time, end-10m."
)
@click.option("--until", metavar="TIME", help="Print only records before this time.")
@click.option("--head", type=click.IntRange(min=0), metavar="N", help="Print only the first N selected records.")
@click.option(
    "--tail",
    type=click.IntRange(min=0),
    metavar="N",
    help="Print only the last N selected records; with -f, then new ones.",
)
@click.option("--total", is_flag=True, help="Print only the number of records.")
@click.option(
    "--count", "counted", multiple=True, metavar="FIELD[,FIELD...]", help="Print how often each value occurs."
)
@click.option("--tables", "only_tables", is_flag=True, help="Print only the keyed tables, in their last state.")
@click.option("--hist", "measured", multiple=True, metavar="FIELD", help="Print a histogram of the field.")
@sum_options("Print")
@stacks_options
@click.option("--format", "format_name", type=click.Choice(FORMATS), default="text", show_default=True)
@skip_damaged_option()
@templates_option("Prefer the templates in this directory to those of the programs.")
def log_command(**values: Any) -> int:
    """
    Print the records of trace files, by default of the manager's trace file.

    The manager's trace file contains the latest records of all inserted programs, including those removed since.
    Several files are merged by time.

    A condition compares major, minor, cpu, pid, tid, uid, cs, ip, ss, sp, word_size, time, stack_trace, name (of the
    process), module, program, symbol, function, host, or fields of the data (arg0, word0, ...) with ==, !=, <, <=, >,
    >=, =~ "pattern*", !~, startswith, contains or in (1, 2); and, or, not and parentheses combine comparisons.
    """
    given = _LogOptions(**values)
    profile, wanted = _views_of(given)
    data = _record_data() if given.filters else None
    chosen: list[RowFilter] = [compile_filter(text, called="--filter", data=data) for text in given.filters]
    if given.name is not None:
        chosen.append(program_filter(given.name))
    paths = _paths(given.files, follow=given.follow)
    if given.since is not None or given.until is not None:
        chosen.append(_time_filter(given.since, given.until, paths, skip_damaged=given.skip_damaged))
    selection = Selection(chosen)
    templates = read_templates(given.templates)
    printer = Printer(given.format_name, templates)
    report = DamageReport()
    followers = _followers(paths, report if given.skip_damaged else None)
    try:
        if given.total:
            with Progress("counting records"):
                count = _count(selection, followers)
            click.echo(count)
        elif profile is not None:
            if profile.names_table and chosen:
                raise click.UsageError(f"--weight {profile.weight} is a whole table: leave out the conditions")
            from dprobes.cli.output.stack_profiles import profile_traces

            def tables() -> list[TraceTables]:
                return [] if chosen else [each for follower in followers for each in follower.tables()]

            warn_of_all(profile_traces(_found(selection, followers, None), profile, tables))
        elif wanted:
            _aggregate(selection, followers, wanted, templates)
        elif given.follow:
            _follow(selection, followers, paths, printer, given.head, given.tail)
        else:
            is_all = not chosen and given.head is None and given.tail is None
            _print_found(selection, followers, printer, given, is_all=is_all)
        if data is not None:
            data.check()
    except KeyboardInterrupt:
        pass
    finally:
        for follower in followers:
            follower.close()
        report.finish()
    return 0


def _views_of(given: _LogOptions) -> tuple[StacksOptions | None, WantedFields]:
    """Return the views that replace records; raise a usage error for an invalid combination of options."""
    head_or_tail = given.head is not None or given.tail is not None
    if given.head is not None and given.tail is not None:
        raise click.UsageError("--head and --tail exclude each other")
    profile = stacks_of(given.stacks, given.weight, given.baseline)
    wanted = WantedFields.of_options(given.counted, given.measured, given.summed, given.by)
    if (given.total or wanted or profile) and (given.follow or head_or_tail):
        options = {
            "--total": given.total,
            "--count": given.counted,
            "--hist": given.measured,
            "--sum": given.summed,
            "--stacks": True,
        }
        what = next(option for option, value in options.items() if value)
        raise click.UsageError(f"{what} needs all records: leave out --follow, --head and --tail")
    if given.total and (wanted or profile):
        raise click.UsageError("--total prints nothing else: leave out --count, --hist, --sum and --stacks")
    if profile is not None:
        from dprobes.cli.output.stack_profiles import check_stacks_target

        if wanted:
            raise click.UsageError("--stacks prints nothing else: leave out --count, --hist and --sum")
        check_stacks_target(profile.target)
    return profile, wanted


def _print_found(
    selection: Selection,
    followers: Sequence[TraceFollower],
    printer: Printer,
    given: _LogOptions,
    *,
    is_all: bool,
) -> None:
    """Print the existing records, followed by the keyed tables."""
    found = _found(selection, followers, given.tail)
    if not given.only_tables:
        printer.print(found if given.head is None else _first(found, given.head))
    if given.only_tables or is_all:
        _print_tables(followers, given.format_name)


def _record_data() -> RecordData:
    from dprobes.sinks.field_columns import RecordData

    return RecordData()


def _paths(files: Sequence[Path], *, follow: bool) -> list[Path]:
    if files:
        return list(dict.fromkeys(files))
    from dprobes.manager.manager_files import manager_paths

    file = manager_paths().trace
    if not file.exists() and not follow:
        raise FormatError(f"'{file}': nothing has been recorded", hint="'dprobes insert FILE' begins it")
    return [file]


def _followers(paths: Sequence[Path], on_damage: Callable[[Damage], None] | None) -> list[TraceFollower]:
    """
    Return followers of trace files; ``on_damage`` is called for skipped bytes.

    A follower also reads the older part of its file, unless that is named in ``paths`` itself.
    """
    return [TraceFollower(path, with_older=older_part(path) not in paths, on_damage=on_damage) for path in paths]


# Times


def _time_filter(since: str | None, until: str | None, paths: Sequence[Path], *, skip_damaged: bool) -> RowFilter:
    bounds = None
    if any(text is not None and needs_bounds(text) for text in (since, until)):
        bounds = _bounds(paths, skip_damaged=skip_damaged)
    now = time.time_ns()

    def parsed(option: str, text: str | None) -> int | None:
        try:
            return None if text is None else parse_time(text, now=now, bounds=bounds)
        except (ValueError, OverflowError):
            raise click.UsageError(f"{option}: '{text}' is not a time; write {TIME_FORMS}") from None

    first, last = parsed("--since", since), parsed("--until", until)
    if first is not None and last is not None and first >= last:
        raise click.UsageError(f"--since {since} is not before --until {until}")
    return time_filter(first, last)


def _bounds(paths: Sequence[Path], *, skip_damaged: bool) -> tuple[int, int] | None:
    """Return when the first and the last record were written, in nanoseconds since 1970, or None without records."""
    first = last = None
    on_damage = (lambda _: None) if skip_damaged else None  # damage is reported when the records are read
    for each in _followers([path for path in paths if path.exists()], on_damage):
        with each as follower:
            for found in follower.poll():
                if not isinstance(found, LostRecords | MissingPart):
                    begin, end = found.written + found.wall_offset, found.last_written + found.wall_offset
                    first = begin if first is None else min(first, begin)
                    last = end if last is None else max(last, end)
    return None if first is None or last is None else (first, last)


# Records


def _found(
    selection: Selection, followers: Sequence[TraceFollower], tail: int | None
) -> Iterator[TraceRecord | LostRecords]:
    """
    Iterate over the selected existing records, merged by time if there are several files.

    ``tail`` is the number of records to return from the end; None means all.
    """

    def of(follower: TraceFollower) -> Iterable[TraceRecord | LostRecords]:
        found = _warned(follower.poll())
        return selection.records(found) if tail is None else selection.last(found, tail)

    if len(followers) == 1:
        yield from of(followers[0])
        return
    from dprobes.trace.trace_content import merged

    found = merged([of(follower) for follower in followers])
    yield from found if tail is None else _last(list(found), tail)


def _last(found: list[TraceRecord | LostRecords], count: int) -> list[TraceRecord | LostRecords]:
    """Return the shortest end of a list that contains ``count`` records, besides notes of lost records."""
    for at in range(len(found) - 1, -1, -1):
        if not isinstance(found[at], LostRecords):
            count -= 1
        if count < 0:
            return found[at + 1 :]
    return found


def _warned(found: Iterable[Block | LostRecords | MissingPart]) -> Iterator[Block | LostRecords]:
    for each in found:
        if isinstance(each, MissingPart):
            console.warning(each.message)
        else:
            yield each


def _first(found: Iterable[TraceRecord | LostRecords], count: int) -> Iterator[TraceRecord | LostRecords]:
    if count:
        for each in found:
            yield each
            count -= not isinstance(each, LostRecords)
            if not count:
                return


def _count(selection: Selection, followers: Sequence[TraceFollower]) -> int:
    count = 0
    lost: Counter[str] = Counter()
    for follower in followers:
        for each in _warned(follower.poll()):
            if isinstance(each, LostRecords):
                lost[each.program.name] += each.count
            else:
                count += selection.count(each)
    warn_of_all(lost)
    return count


def _aggregate(
    selection: Selection,
    followers: Sequence[TraceFollower],
    wanted: WantedFields,
    templates: Templates | None,
) -> None:
    from dprobes.cli.output.aggregation import aggregate_traces

    found = (each for follower in followers for each in _warned(follower.poll()))
    warn_of_all(aggregate_traces(found, selection, wanted, templates))


def _print_tables(followers: Sequence[TraceFollower], format_name: str) -> None:
    """Print the keyed tables of files that have been read completely, if the format can represent tables."""
    if format_name not in ("text", "json"):
        return
    from dprobes.cli.console import print_lines
    from dprobes.cli.output.run_views import lines_of
    from dprobes.formatters.table_addresses import names_for
    from dprobes.record.record_origin import boot_id

    own = boot_id()

    for follower in followers:
        for _ in follower.poll():
            pass
        for found in follower.tables():
            program = found.program
            is_live = bool(own) and program.origin.boot_id == own
            tables = [each.table for each in found.contents]
            names = names_for(program.source, tables, live=is_live, carried=program.names)
            if lines := lines_of(found.contents, as_json=format_name == "json", names=names):
                print_lines(lines)


# Following


def _follow(
    selection: Selection,
    followers: Sequence[TraceFollower],
    paths: Sequence[Path],
    printer: Printer,
    head: int | None,
    tail: int | None,
) -> None:
    """
    Print existing records, the last ``tail`` of them, then new ones as they arrive, up to ``head`` records in all.

    Records of several files that arrive together are sorted by time. None means no limit.
    """
    _wait_for(lambda: all(path.exists() for path in paths))

    def rounds() -> Iterator[Iterator[TraceRecord | LostRecords]]:
        yield _found(selection, followers, tail)
        while not _nobody_reads():
            time.sleep(_INTERVAL)
            yield _found(selection, followers, None)

    for found in rounds():
        printed = printer.print(found if head is None else _first(found, head))
        if head is not None:
            head -= printed
            if head <= 0:
                return


def _wait_for(is_there: Callable[[], bool]) -> None:
    while not is_there() and not _nobody_reads():
        time.sleep(_INTERVAL)


def _nobody_reads() -> bool:
    """Return whether standard output is a pipe without a reader, which a write would report only at the next record."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(events & (select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0))
