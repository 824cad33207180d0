"""The verbs of the manager's programs: ``query``, ``getvars``, ``remove``, ``stop`` and ``log-target``."""

from __future__ import annotations

import base64
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dprobes.cli import console
from dprobes.cli.console import print_line, print_lines, print_table
from dprobes.cli.output.run_summary import faulted_runs, neighbour_writes
from dprobes.cli.record_options import log_format_option
from dprobes.engines.engine_registry import rows
from dprobes.errors import ManagerError
from dprobes.escapes import json_text
from dprobes.formatters.json_formatter import exact
from dprobes.manager.client import ManagerClient
from dprobes.resolve.probepoints import ProbeState
from dprobes.sinks.target_kinds import kinds, parse_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dprobes.engines.engine_interface import Notice
    from dprobes.manager.manager_messages import ManagedProbepoint, ManagedProgram, ManagedVariables
    from dprobes.sinks.sink_thread import TargetStatus

__all__ = ["absolute_target", "client", "print_json"]

# The options and the connection of these verbs.


def client(*, starts: bool = False, patience: float | None = None) -> ManagerClient:
    """
    Return the client of the probe manager, which prints notices on standard error.

    With ``starts``, a manager is started if none runs. ``patience`` is the time limit of a request in seconds.
    """
    return ManagerClient(starts=starts, notify=_print, patience=patience)


def _print(notice: Notice) -> None:
    (console.warning if notice.is_warning else console.note)(notice.message, notice.hint, notice.details)


def name_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options ``--name`` and ``--all``, which select programs of the manager, to a command."""
    for option in (
        click.option("-a", "--all", "everything", is_flag=True, help="Select all programs."),
        click.option(
            "--name", metavar="NAME", help="Select the program of this name: its module's name, or that given by --as."
        ),
    ):
        function = option(function)
    return function


def one_of(name: str | None, *, everything: bool) -> None:
    """Raise a usage error if both ``--name`` and ``--all`` are given."""
    if name is not None and everything:
        raise click.UsageError("give one of --name NAME and --all")


def print_json(value: object) -> None:
    """Print a result on standard output as one JSON value."""
    click.echo(json_text(exact(value), indent=2))


_COUNTS = ("hits", "records", "lost", "passed", "missed", "skipped")
_RARE = ("passed", "missed", "skipped")
"""Counts that have no column if all are zero."""
_MANY = 40
"""
Maximum number of a program's probepoints that are all listed.

Of more, only those with hits or not active are listed.
"""


@click.command("query")
@name_option
@click.option("-x", "--extended", is_flag=True, help="Also print headers, places, variables and disassembled handlers.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def query_command(name: str | None, everything: bool, extended: bool, as_json: bool) -> int:
    """
    Print the inserted programs with the states and counts of their probepoints.

    States are COMPILED (known, but not inserted yet), ACTIVE, MISMATCH (other code is there), CONFLICT (another
    tool's breakpoint is there), DISABLED (by maxhits or --overhead), REMOVED, INVALID_OFFSET, EXCLUDED (would probe
    dprobes itself), DEBUGREG_UNAVAIL, and WATCHPOINT_LEN_INVALID.
    """  # fmt: skip
    one_of(name, everything=everything)
    with client() as manager:
        programs = manager.programs(name, extended=extended and not as_json)
        problem = manager.status().trace_problem
    if problem is not None:
        console.warning(f"records are lost: {problem}")
    if as_json:
        print_json({"programs": [program.answer for program in programs]})
        return 0
    if not programs:
        print_line("no program is inserted")
    for number, program in enumerate(programs):
        if number:
            print_line()
        if extended:
            _extended(program)
        else:
            counts_table(program, _title(program))
    return 0


def _title(program: ManagedProgram) -> str:
    module = "" if program.name == program.module else f" (module {program.module})"
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(program.since))
    count = len(program.probepoints)
    title = (
        f"{program.name}{module}: {count} probepoint{'s' if count != 1 else ''}, "
        f"engine {program.engine}, {_scope(program.answer['scope'])}, since {began}"
    )
    if program.ended:
        title += ", ended" + (f": {program.problem}" if program.problem else "")
    return title


def _scope(scope: dict[str, Any]) -> str:
    behind = f"behind the stub {scope['endpoint']}" if "endpoint" in scope else ""
    if "pid" in scope:
        process = f"process {scope['pid']}" + (" and what it starts" if scope["follow"] else "")
        return f"{process} {behind}".rstrip()
    if behind:
        return behind
    if "cgroup" in scope:
        return f"cgroup {scope['cgroup']}"
    return f"user {scope['uid']}" if "uid" in scope else "all processes"


def counts_table(program: ManagedProgram, title: str) -> None:
    """Print a table of the probepoints of a program with state and counts, below ``title``."""
    probes = program.probepoints
    shown = [p for p in probes if len(probes) <= _MANY or p.counts.hits or p.state is not ProbeState.ACTIVE]
    with_path = len({probe.path for probe in probes}) > 1
    counts = [each for each in _COUNTS if each not in _RARE or any(getattr(p.counts, each) for p in shown)]
    rows = [
        (
            f"{probe.major},{probe.minor}",
            _place(probe, with_path=with_path),
            probe.state.value,
            *(str(getattr(probe.counts, count)) for count in counts),
        )
        for probe in shown
    ]
    print_table(("probe", "place", "state", *counts), rows, title)
    if len(shown) < len(probes):
        print_line(f"and {len(probes) - len(shown)} active probepoints that were not hit")
    for line in _remarks(program):
        print_line(line)


def _place(probe: ManagedProbepoint, *, with_path: bool) -> str:
    place = f"{probe.where} (return)" if probe.at_return else probe.where
    if probe.patch is not None:
        place += f", replaced by {probe.patch}"
    return f"{place} in {probe.path}" if with_path else place


def _remarks(program: ManagedProgram) -> Iterator[str]:
    for probe in program.probepoints:
        if probe.detail:
            yield f"{probe.major},{probe.minor}  {probe.state.value} at {probe.where}: {probe.detail}"
        if probe.counts.faulted:
            yield f"{probe.major},{probe.minor}  {faulted_runs(probe.counts, probe.where)}"
        if probe.counts.neighbours:
            yield f"{probe.major},{probe.minor}  {neighbour_writes(probe.counts, probe.where)}"
    for each in program.filters:
        yield f"hits that --filter '{each}' refuses make no record"
    if program.pending:
        yield f"{program.pending} of the records are pending: they are not in the trace file yet"
    if program.unwritten:
        yield f"{program.unwritten} records were lost because the trace file could not be written"
    for number in program.not_resolved:
        yield f"definition {number + 1} is not resolved: no file of the module '{program.module}' has been found"
    if left_out := program.answer["left_out"]:
        yield f"left out {len(left_out)} functions that match a pattern; --json names them"


def _extended(program: ManagedProgram) -> None:
    from dprobes.arch import architecture
    from dprobes.cli.output.program_listing import Disassembly
    from dprobes.diagnostics import Diagnostics
    from dprobes.filters.handler_filter import with_filters
    from dprobes.ppdf.ppdf_file import decode
    from dprobes.rpn.rpn_program import select_all

    print_line(_title(program))
    answer = program.answer
    print_line("  " + ", ".join(f"{key} = {_value(value)}" for key, value in answer["header"].items()))
    for what in ("groups", "types", "filters", "locals", "notices"):
        if answer[what]:
            print_line(f"  {what}: " + ", ".join(str(value) for value in answer[what]))
    ppdf = decode(base64.b64decode(answer["ppdf"]))
    machine = ppdf.builds[0].machine if ppdf.builds else ppdf.machines[0]
    # Offsets are those in the encoding of the selection; definitions of all modules are numbered together.
    handlers = []
    chosen = answer["selected"]["groups"], answer["selected"]["types"]
    for member in select_all([each.program for each in ppdf.members], *chosen):
        code = Disassembly(with_filters(member, answer["filters"], Diagnostics()), architecture(machine))
        handlers += [(code, number) for number in range(len(member.definitions))]
    for number in sorted({probe.definition for probe in program.probepoints} | set(program.not_resolved)):
        mine = [probe for probe in program.probepoints if probe.definition == number]
        print_line()
        for probe in mine:
            for line in _extended_probe(probe):
                print_line(line)
        code, own = handlers[number]
        for line in code.handler(own):
            print_line(line)
    for line in _remarks(program):
        print_line(line)


def _value(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _extended_probe(managed: ManagedProbepoint) -> Iterator[str]:
    probe = managed.answer
    yield f"{managed.major},{managed.minor}  {_place(managed, with_path=True)}  {managed.state.value}"
    if probe["kind"] == "breakpoint":
        placed = "" if probe["placed"] == probe["offset"] else f", placed at {probe['placed']:#x}"
        yield f"  offset {probe['offset']:#x}{placed}, opcode {probe['opcode']:#04x}: {probe['instruction']}"
    elif probe["kind"] == "watchpoint":
        yield f"  watchpoint {probe['access']}, {probe['length']} bytes at {probe['address']:#x}"
    else:
        yield f"  sampler, {probe['where']}"
    limits = [f"{key} = {probe[key]}" for key in ("passcount", "maxhits") if probe[key]]
    limits += [f"group = {probe['group']}"] if probe["group"] else []
    limits += [f"type = {', '.join(probe['types'])}"] if probe["types"] else []
    if limits:
        yield "  " + ", ".join(limits)
    counts = probe["counts"]
    executed = f", executed {', '.join(counts['executed'])}" if counts["executed"] else ""
    yield "  " + ", ".join(f"{counts[count]} {count}" for count in _COUNTS) + executed


# The verb ``getvars``: the variables of inserted programs.


@click.command("getvars")
@name_option
@click.option(
    "-i", "--index", "span", metavar="N1-N2", help="Select the variables with these indices, or with a single index."
)
@click.option("--local", "wants_locals", is_flag=True, help="Select only local and CPU variables.")
@click.option("--global", "wants_globals", is_flag=True, help="Select only global variables.")
@click.option("--reset", is_flag=True, help="Set them to zero instead of printing them.")
@click.option(
    "--clear",
    "clears",
    multiple=True,
    metavar="TABLE",
    help="Empty the keyed tables of this name, or of names that match a pattern, instead of printing: '*' is all.",
)
@click.option("--json", "as_json", is_flag=True, help="Print them as JSON.")
def getvars_command(
    name: str | None,
    everything: bool,
    span: str | None,
    wants_locals: bool,
    wants_globals: bool,
    reset: bool,
    clears: tuple[str, ...],
    as_json: bool,
) -> int:
    """
    Print the global variables, and the local and CPU variables and keyed tables of inserted programs.

    All programs of the manager share one array of global variables, which outlives programs. Each CPU has its own CPU
    variables; the last column is their sum.
    """
    one_of(name, everything=everything)
    if clears and (reset or wants_globals or span is not None):
        raise click.UsageError("--clear applies to keyed tables: leave out --reset, --global and --index")
    both = wants_locals == wants_globals
    with client() as manager:
        result = manager.variables(
            name,
            wants_locals=both or wants_locals,
            wants_globals=wants_globals or (both and name is None and not clears),
            index=None if span is None else _span(span),
            resets=reset,
            clears=clears,
        )
    if reset or clears:
        return 0
    if as_json:
        print_json(_with_tables(result))
        return 0
    _print_values(result)
    return 0


def _with_tables(result: ManagedVariables) -> dict[str, Any]:
    """Return the reply with the rows of keyed tables as objects."""
    answer = dict(result.answer)
    programs = [dict(each) for each in answer.get("programs") or ()]
    for shown, program in zip(programs, result.programs, strict=True):
        if program.tables is not None:
            shown["tables"] = [row for table in program.keyed_tables().values() for row in table.to_dicts()]
    if "programs" in answer:
        answer["programs"] = programs
    return answer


def _span(text: str) -> tuple[int, int]:
    first, dash, last = text.removeprefix("=").partition("-")
    try:
        bounds = int(first, 0), int(last if dash else first, 0)
    except ValueError:
        raise click.UsageError(f"--index: expected N1-N2, found '{text}'") from None
    if bounds[0] > bounds[1]:
        raise click.UsageError(f"--index: {bounds[0]} is greater than {bounds[1]}")
    return bounds


def _print_values(result: ManagedVariables) -> None:
    first = result.first
    if result.globals is not None:
        _variables("global variables", "gv", first, result.globals)
    for program in result.programs:
        if program.local:
            _variables(f"local variables of {program.name}", "lv", first, program.local)
        if any(program.cpu):
            rows = [
                (f"cv,{first + n}", *map(str, values), str(sum(values)))
                for n, values in enumerate(zip(*program.cpu, strict=True))
            ]
            header = ("variable", *(f"cpu {n}" for n in range(len(program.cpu))), "sum")
            print_table(header, rows, f"CPU variables of {program.name}")
        if program.tables is not None:
            print_line(f"tables of {program.name}")
            print_lines(line for table in program.keyed_tables().values() for line in str(table).split("\n"))


def _variables(title: str, kind: str, first: int, values: Sequence[int]) -> None:
    if not values:
        print_line(f"no {title}" + (f" from index {first} on" if first else ""))
        return
    rows = [(f"{kind},{first + n}", str(value), f"{value:#x}") for n, value in enumerate(values)]
    print_table(("variable", "value", "hex"), rows, title)


# The verb ``remove``: removal of inserted programs, or of single probepoints.


@click.command("remove")
@click.argument("probe", required=False, metavar="[MAJOR,MINOR]")
@name_option
def remove_command(probe: str | None, name: str | None, everything: bool) -> int:
    """
    Remove the program --name NAME, or --all programs, and print the counts of their probepoints.

    With MAJOR,MINOR, remove only the probepoints with these codes, of the program --name NAME or of all programs.
    """
    one_of(name, everything=everything)
    if probe is None and name is None and not everything:
        raise click.UsageError("name what to remove: --name NAME, --all, or MAJOR,MINOR")
    with client() as manager:
        if probe is not None:
            count = manager.remove_probepoints(*_codes(probe), name)
            print_line(f"removed {count} probepoint{'s' if count > 1 else ''} {probe}")
            return 0
        removed = manager.remove(name)
    for program in removed:
        counts_table(program, f"removed {program.name}")
    if not removed:
        print_line("no program is inserted")
    return 0


def _codes(text: str) -> tuple[int, int]:
    try:
        major, minor = (int(part, 0) for part in text.split(","))
    except ValueError:
        raise click.UsageError(f"expected the codes of a probepoint, MAJOR,MINOR, found '{text}'") from None
    return major, minor


# The verb ``stop``: removal of everything at once.


_PATIENCE = 10.0
"""Seconds within which the manager must reply, and then exit by itself, before it is killed."""


@click.command("stop")
@click.option("--manager", "ends", is_flag=True, help="Also end the probe manager, and with it its global variables.")
@click.option("--left", "is_about_left", is_flag=True, help="Only remove jumps and memory of killed runs.")
def stop_command(ends: bool, is_about_left: bool) -> int:
    """
    Remove all programs of the probe manager at once: the kill switch.

    A manager that does not answer in time is terminated, and killed if it does not end; then the kernel and the tracers
    remove its probepoints.

    If all processes of a run with --engine inline are killed at once, a probed process may keep jumps and memory. They
    do no harm. The next run on that process removes them; --left removes them from all processes.
    """
    if is_about_left:
        for row in rows():
            for left in row.remove_left():
                print_line(f"process {left.pid}: {left.said}")
        return 0
    manager = client(patience=_PATIENCE)
    try:
        with manager:
            stopped = manager.stop(ends=ends)
    except ManagerError as error:
        if (killed := manager.kill(_PATIENCE)) is None:
            raise
        console.warning(f"{error.message}; {'killed' if killed.by_force else 'ended'} process {killed.pid}")
        return 0
    print_line(f"stopped {stopped.count} program{'s' if stopped.count != 1 else ''}")
    if stopped.unfinished:
        manager.kill(_PATIENCE)
        console.warning(f"these did not end in time, so the manager was terminated: {', '.join(stopped.unfinished)}")
    return 0


# The verb ``log-target``: destinations of records other than the manager's trace file.


@click.group("log-target")
def log_target_command() -> None:
    """
    Add, remove and list log targets, also while programs are active.

    'dprobes log-target kinds' lists what TARGET may be: KLOG, the path of a file, syslog:udp://HOST and many
    others. The manager's trace file, which 'dprobes log' reads, always gets all records.
    """


def absolute_target(target: str) -> str:
    """Return the name of a target independent of the current directory, which differs in the manager."""
    return parse_target(target).absolute(Path.cwd()).text


@log_target_command.command("add")
@click.argument("target")
@click.option("--name", metavar="NAME", help="Send only records of the program of this name.")
@log_format_option("text", "--format")
def add(target: str, name: str | None, log_format: str) -> int:
    """Add a log target."""
    with client() as manager:
        manager.add_target(absolute_target(target), name, log_format)
    return 0


@log_target_command.command("remove")
@click.argument("target")
@click.option("--name", metavar="NAME", help="Remove only the log target for the program of this name.")
def remove(target: str, name: str | None) -> int:
    """Remove a log target, and print its counts."""
    with client() as manager:
        _print_target(manager.remove_target(absolute_target(target), name))
    return 0


@log_target_command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print them as JSON.")
def list_targets(as_json: bool) -> int:
    """List the log targets."""
    with client() as manager:
        targets = manager.targets()
    if as_json:
        print_json({"targets": [asdict(target) for target in targets]})
    elif targets:
        _print_target(targets)
    else:
        print_line("no log targets besides the manager's trace file")
    return 0


@log_target_command.command("kinds")
def list_kinds() -> int:
    """List the kinds of log targets."""
    print_table(("target", "what it is"), [(kind.syntax, kind.doc) for kind in kinds()])
    return 0


def _print_target(targets: Sequence[TargetStatus]) -> None:
    rows = [
        (
            target.name,
            target.module or "all",
            target.format,
            str(target.written),
            str(target.waiting),
            str(target.lost),
            target.problem or "",
        )
        for target in targets
    ]
    print_table(("target", "program", "format", "written", "waiting", "lost", "problem"), rows)
