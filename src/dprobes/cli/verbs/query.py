"""The verb ``query``: what is inserted, its state, and what it has counted."""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING, Any

import click

from dprobes.cli import console
from dprobes.cli.managed import client, name_option, one_of, print_json
from dprobes.cli.output.summary import faulted_runs
from dprobes.cli.output.textoutput import print_line, print_table
from dprobes.resolve.probestate import ProbeState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.manager.results import ManagedProbepoint, ManagedProgram

__all__ = ["command", "counts_table"]

_COUNTS = ("hits", "records", "lost", "passed", "recursed", "missed", "skipped")
_HEADER = ("probe", "place", "state", *_COUNTS)
_MANY = 40
"""Up to so many probepoints of a program are all listed; of more only those that were hit or are not active."""


@click.command("query")
@name_option
@click.option("-x", "--extended", is_flag=True, help="Also print headers, places, variables and disassembled handlers.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(name: str | None, everything: bool, extended: bool, as_json: bool) -> int:
    """
    Print the inserted programs with the states and counts of their probepoints.

    States are COMPILED (known, but not inserted yet), ACTIVE, MISMATCH (other code is there), CONFLICT (another tool's
    breakpoint is there), DISABLED (maxhits is reached), REMOVED, INVALID_OFFSET, EXCLUDED (would probe dprobes itself),
    DEBUGREG_UNAVAIL, and WATCHPOINT_LEN_INVALID.
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
    """Print the probepoints of a program with state and counts."""
    probes = program.probepoints
    shown = [p for p in probes if len(probes) <= _MANY or p.counts.hits or p.state is not ProbeState.ACTIVE]
    with_path = len({probe.path for probe in probes}) > 1
    rows = [
        (
            f"{probe.major},{probe.minor}",
            _place(probe, with_path=with_path),
            probe.state.value,
            *(str(getattr(probe.counts, count)) for count in _COUNTS),
        )
        for probe in shown
    ]
    print_table(_HEADER, rows, title)
    if len(shown) < len(probes):
        print_line(f"and {len(probes) - len(shown)} active probepoints that were not hit")
    for line in _remarks(program):
        print_line(line)


def _place(probe: ManagedProbepoint, *, with_path: bool) -> str:
    place = f"{probe.where} (return)" if probe.at_return else probe.where
    return f"{place} in {probe.path}" if with_path else place


def _remarks(program: ManagedProgram) -> Iterator[str]:
    for probe in program.probepoints:
        if probe.detail:
            yield f"{probe.major},{probe.minor}  {probe.state.value} at {probe.where}: {probe.detail}"
        if probe.counts.faulted:
            yield f"{probe.major},{probe.minor}  {faulted_runs(probe.counts, probe.where)}"
    for each in program.filters:
        yield f"hits that --filter '{each}' does not hold for make no record"
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
    from dprobes.cli.output.handlercode import Disassembly
    from dprobes.diagnostics import Diagnostics
    from dprobes.filters.handlerfilter import with_filters
    from dprobes.ppdf.reader import decode
    from dprobes.rpn.groups import select_all

    print_line(_title(program))
    answer = program.answer
    print_line("  " + ", ".join(f"{key} = {_value(value)}" for key, value in answer["header"].items()))
    for what in ("groups", "types", "filters", "locals", "notices"):
        if answer[what]:
            print_line(f"  {what}: " + ", ".join(str(value) for value in answer[what]))
    ppdf = decode(base64.b64decode(answer["ppdf"]))
    machine = ppdf.builds[0].machine if ppdf.builds else ppdf.machines[0]
    # Offsets are those in the encoding of what was selected; definitions of all modules are counted in one.
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
        yield f"  sampler, {probe['frequency']} hz"
    limits = [f"{key} = {probe[key]}" for key in ("passcount", "maxhits") if probe[key]]
    limits += [f"group = {probe['group']}"] if probe["group"] else []
    limits += [f"type = {', '.join(probe['types'])}"] if probe["types"] else []
    if limits:
        yield "  " + ", ".join(limits)
    counts = probe["counts"]
    executed = f", executed {', '.join(counts['executed'])}" if counts["executed"] else ""
    yield "  " + ", ".join(f"{counts[count]} {count}" for count in _COUNTS) + executed
