"""``--stacks``: the profile of call stacks that replaces the records of a run or of trace files."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from dprobes.cli import console
from dprobes.errors import FormatError, reason_of
from dprobes.sinks.target_kinds import is_trace_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dprobes.record.record_origin import RecordSource
    from dprobes.rpn.keyed_tables import Table
    from dprobes.sinks.stacks.stack_profile import StackCollector, StackProfile
    from dprobes.trace.trace_content import LostRecords, TraceProgram, TraceRecord, TraceTables

__all__ = [
    "FOLDED",
    "StacksOptions",
    "check_stacks_target",
    "is_perfetto",
    "profile_traces",
    "profiled_table",
    "stacks_of",
    "write_profile",
    "write_stacks",
]

FOLDED = "folded"
"""The value of ``--stacks`` that prints folded stacks."""


class StacksOptions(NamedTuple):
    """The options of ``--stacks``: the destination of the profile, the field with weights, and the baseline."""

    target: str
    weight: str | None = None
    baseline: Path | None = None

    @property
    def names_table(self) -> bool:
        """True if a table, ``@NAME``, has the weights, and not a field of records."""
        return self.weight is not None and self.weight.startswith("@")


def stacks_of(target: str | None, weight: str | None, baseline: Path | None) -> StacksOptions | None:
    """
    Return the options of profiles, or None without ``--stacks``; raise ``UsageError`` for an invalid combination.

    The arguments are the values of ``--stacks``, ``--weight`` and ``--baseline``.
    """
    if target is None:
        if weight is not None or baseline is not None:
            raise click.UsageError(f"--{'baseline' if weight is None else 'weight'} needs --stacks")
        return None
    if baseline is not None and not target.lower().endswith((".html", ".htm")):
        raise click.UsageError("--baseline needs a flame graph: --stacks FILE.html")
    return StacksOptions(target, weight, baseline)


def check_stacks_target(target: str) -> None:
    """Raise ``UsageError`` if the value of ``--stacks`` is not a possible destination of a profile."""
    if target != FOLDED and not is_perfetto(target):
        _writer_of(target)


def profiled_table(tables: Iterable[Table], options: StacksOptions, *, logs_stacks: bool) -> Table | None:
    """
    Return the table whose keys are the stacks of the profile, or None if it is a profile of records.

    ``--weight @TABLE`` names the table. Otherwise it is the only table with stacks, if the program logs no stacks.
    Raise ``FormatError`` if the table is unknown, or if several are possible.
    """
    from dprobes.keyed.table_text import shown_name
    from dprobes.sinks.stacks.stack_profile import has_weighed_stacks

    by_name = {shown_name(table): table for table in tables if has_weighed_stacks(table)}
    names = ", ".join(by_name)
    chosen = None
    if options.weight is not None and options.names_table:
        if options.weight not in by_name:
            hint = f"tables for --weight: {names}" if names else None
            raise FormatError(f"no table '{options.weight}' has call stacks as keys, and counts or sums", hint=hint)
        chosen = by_name[options.weight]
    elif options.weight is None and not logs_stacks:
        if len(by_name) > 1:
            hint = f"name the one of the profile: --weight {next(iter(by_name))}"
            raise FormatError(f"several tables have call stacks as keys: {names}", hint=hint)
        chosen = next(iter(by_name.values()), None)
    if chosen is not None and is_perfetto(options.target):
        hint = "log the stacks instead, or write a flame graph: --stacks FILE.html"
        raise FormatError(f"table '{shown_name(chosen)}' has no times of its stacks, which a trace needs", hint=hint)
    return chosen


def profile_traces(
    found: Iterable[TraceRecord | LostRecords], options: StacksOptions, tables: Callable[[], Sequence[TraceTables]]
) -> Counter[str]:
    """
    Write the profile of trace files; return the number of lost records by program.

    ``tables`` returns the keyed tables of the files, after the last record in ``found``. Raise ``FormatError`` as
    ``profiled_table`` does, and if there are records, but no program's records have the field with weights.
    """
    collector, lost = _of_trace(found, options, tables)
    write_profile(collector, options)
    return lost


def _of_trace(
    found: Iterable[TraceRecord | LostRecords], options: StacksOptions, tables: Callable[[], Sequence[TraceTables]]
) -> tuple[StackCollector, Counter[str]]:
    from dprobes.formatters.table_addresses import ProcessAddresses, names_for
    from dprobes.sinks.stacks.stack_profile import StackCollector

    weight = None if options.names_table else options.weight
    collector, lost = _collect(found, weight, keeps_samples=is_perfetto(options.target))
    every = [(each.program, contents) for each in tables() for contents in each.contents]
    table = profiled_table([each.table for _, each in every], options, logs_stacks=bool(collector.profile().weights))
    if table is None:
        return collector, lost
    collector = StackCollector()
    for program, contents in every:
        if contents.table.name == table.name:
            names = names_for(program.source, [contents.table], live=program.may_run, carried=program.names)
            assert isinstance(names, ProcessAddresses), "its keys are addresses"
            collector.add_table(contents, names)
    return collector, lost


def _collect(
    found: Iterable[TraceRecord | LostRecords], weight: str | None, *, keeps_samples: bool = False
) -> tuple[StackCollector, Counter[str]]:
    from dprobes.sinks import Batch
    from dprobes.sinks.stacks.stack_profile import StackCollector
    from dprobes.trace.trace_content import LostRecords

    collector = StackCollector(weight, keeps_samples=keeps_samples)
    sources: dict[TraceProgram, RecordSource | None] = {}
    refusals: list[FormatError] = []
    lost: Counter[str] = Counter()
    for each in found:
        program = each.program
        if isinstance(each, LostRecords):
            lost[program.name] += each.count
            continue
        if program not in sources:
            # Programs of several files may have the same number.
            source = replace(program.source, number=len(sources))
            try:
                collector.create_event_of(source, live=program.may_run, carried=program.names)
                sources[program] = source
            except FormatError as error:
                sources[program] = None
                refusals.append(error)
        if (known := sources[program]) is not None:
            place = program.place(each.probe).in_module(program.source.module)
            collector.log_events(Batch(known, [each.record], [place], each.wall_offset))
    if sources and len(refusals) == len(sources):
        raise refusals[0]
    return collector, lost


def write_profile(collector: StackCollector, options: StacksOptions) -> None:
    """Write a profile to its destination; raise ``FormatError`` if that fails."""
    target, baseline = options.target, options.baseline
    profile = collector.profile()
    if collector.without and collector.table is not None:
        what = "1 row has" if collector.without == 1 else f"{collector.without} rows have"
        console.note(f"{what} no call stack to be weighed in table '{collector.table}'")
    elif not profile.weights and collector.table is not None:
        console.note(f"table '{collector.table}' is empty, and so is the profile")
    elif collector.without:
        what = "1 record has" if collector.without == 1 else f"{collector.without} records have"
        console.note(f"{what} no call stack to be weighed; 'log ustack' and 'log kstack' log them")
    elif not profile.weights:
        hint = 'a handler logs stacks, or counts them in a table: printf("%k", ustack()), @[ustack()] = count()'
        console.note("there are no records, so the profile is empty", hint)
    if is_perfetto(target):
        _write(target, _trace(collector, profile))
        return
    write_stacks(profile, target, None if baseline is None else _read(baseline, options))


def write_stacks(profile: StackProfile, target: str, baseline: StackProfile | None = None) -> None:
    """
    Print a profile as folded stacks, or write it to the file ``target``; raise ``FormatError`` if that fails.

    A flame graph shows the differences from the ``baseline``.
    """
    if target == FOLDED:
        from dprobes.sinks.stacks.profile_formats import folded_lines

        for line in folded_lines(profile):
            click.echo(line)
        return
    _write(target, _writer_of(target)(profile, baseline))
    console.note(f"'{target}' has {profile.total} {profile.unit} in {_stacks(profile)}")


def _stacks(profile: StackProfile) -> str:
    count = len(profile.weights)
    return f"{count} stack{'s' * (count != 1)}"


def is_perfetto(target: str) -> bool:
    """Return whether the file name ``target`` selects a Perfetto trace, which has the time of each sample."""
    return target.lower().endswith((".pftrace", ".perfetto-trace"))


def _trace(collector: StackCollector, profile: StackProfile) -> bytes:
    from dprobes.sinks.stacks.profile_formats import perfetto_samples

    if collector.left_out:
        console.warning(f"{collector.left_out} samples found no room in the trace")
    samples = len(collector.samples)
    console.note(f"the trace has {samples} sample{'s' * (samples != 1)} of {_stacks(profile)}")
    return perfetto_samples(collector.samples, profile.title, profile.unit, collector.wall_offset)


def _write(target: str, data: bytes) -> None:
    try:
        Path(target).write_bytes(data)
    except OSError as error:
        raise FormatError(f"'{target}': {reason_of(error)}") from error


def _read(path: Path, options: StacksOptions) -> StackProfile:
    """Return the profile in a file of folded stacks, or of a trace file."""
    if is_trace_name(path.name):
        from dprobes.trace.trace_reader import TraceReader

        with TraceReader(path) as reader:
            collector, _ = _of_trace(reader.read(), options, lambda: reader.tables)
            return replace(collector.profile(), title=str(path))
    from dprobes.sinks.stacks.profile_formats import parse_folded

    try:
        return parse_folded(path.read_text(encoding="utf-8", errors="backslashreplace").splitlines(), str(path))
    except OSError as error:
        raise FormatError(f"'{path}': {reason_of(error)}") from error


def _writer_of(target: str) -> Callable[[StackProfile, StackProfile | None], bytes]:
    """
    Return the encoder of profiles for a file, chosen by the extension of its name.

    The encoder's arguments are the profile and its baseline, or None.
    """
    name = target.lower()
    if name.endswith((".html", ".htm")):
        return _page
    if name.endswith((".folded", ".txt")):
        return _folded
    if name.endswith((".pb.gz", ".pprof")):
        return _pprof
    raise click.UsageError(
        f"--stacks: '{target}' is neither 'folded' nor a file that ends in .html, .folded, .pb.gz or .pftrace"
    )


def _page(profile: StackProfile, baseline: StackProfile | None) -> bytes:
    from dprobes.sinks.stacks.profile_formats import flame_graph

    return flame_graph(profile, baseline).encode()


def _folded(profile: StackProfile, _: StackProfile | None) -> bytes:
    from dprobes.sinks.stacks.profile_formats import folded_lines

    return "".join(f"{line}\n" for line in folded_lines(profile)).encode("utf-8", "backslashreplace")


def _pprof(profile: StackProfile, _: StackProfile | None) -> bytes:
    from dprobes.sinks.stacks.profile_formats import pprof_of

    return pprof_of(profile)
