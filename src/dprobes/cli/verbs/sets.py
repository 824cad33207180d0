"""The verb ``sets``: the instrumentation sets of this machine, their probes, and whether their places exist."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dprobes.cli import console
from dprobes.cli.console import Progress, print_line, print_lines, print_table
from dprobes.cli.resolved_program import check_promises, compile_programs, files_of
from dprobes.diagnostics import Diagnostics, Severity, did_you_mean
from dprobes.engines.engine_capabilities import requirements
from dprobes.engines.engine_choice import note_unsupported, obstacle
from dprobes.engines.engine_interface import EngineOptions
from dprobes.engines.engine_registry import engine_row
from dprobes.errors import DprobesError, SourceError
from dprobes.rpn.compilation_passes import CompileOptions
from dprobes.sets import view_in
from dprobes.sets.set_library import choose_set, listed_sets, load_set, set_directories

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dprobes.resolve.local_module import ResolvedProgram
    from dprobes.sets.set_description import InstrumentationSet, SetView

__all__ = ["sets_command"]

_CHECK = "check"


@click.command("sets")
@click.argument("words", nargs=-1, metavar="[[check] NAME[/VIEW]]")
def sets_command(words: tuple[str, ...]) -> int:
    """
    List the instrumentation sets, or the probes and views of the set NAME, or print the view NAME/VIEW.

    'dprobes run NAME' runs all probes of a set, 'dprobes run NAME:GROUP' those of a group. 'dprobes run NAME/VIEW' runs
    a view, a program that answers one question; a view in SQL is for 'dprobes sql FILE NAME/VIEW'. NAME is the name of
    a set, or the path of its directory, with a slash. 'dprobes sets check NAME' prints which modules and places of the
    set this machine has, and which engines can run it; the exit status is 1 if the set cannot be used here.
    """
    if len(words) > 2 or (len(words) == 2 and words[0] != _CHECK):
        wrong = words[0] if len(words) == 2 else words[2]
        raise click.UsageError(f"unexpected argument '{wrong}': expected 'dprobes sets [[check] NAME[/VIEW]]'")
    if not words:
        return _list()
    if words == (_CHECK,):
        raise click.UsageError("name the set to check: dprobes sets check NAME")
    chosen = choose_set(words[-1].partition(":")[0] if "/" not in words[-1] else words[-1])
    if chosen is None:
        hint = did_you_mean(words[-1], [each.name for each in listed_sets()])
        raise click.UsageError(f"there is no set '{words[-1]}'" + (f"; {hint}" if hint else ""))
    if (name := view_in(chosen.path)) is not None:
        found = load_set(chosen.path.parent)
        view = next(each for each in found.views if each.name == name)
        if len(words) == 2 and view.file:
            raise click.UsageError(f"'{words[-1]}' is a view: 'dprobes check {words[-1]}' checks it")
        if len(words) == 2:
            raise click.UsageError(f"'{words[-1]}' is a query: 'dprobes sql FILE {words[-1]}' executes it")
        return _show(found, view)
    return _fit(chosen.path) if len(words) == 2 else _describe(load_set(chosen.path))


def _list() -> int:
    rows, problems = [], []
    for each in listed_sets():
        if isinstance(each.content, DprobesError):
            problems.append((each.directory, each.content))
        else:
            found = each.content
            rows.append((found.name, str(len(found.probes)), " ".join(found.groups), found.summary))
    print_table(("set", "probes", "groups", "summary"), rows)
    print_line(f"Sets are searched for in {', '.join(map(str, set_directories()))}")
    for directory, problem in problems:
        console.warning(f"the set in '{directory}' cannot be used: {problem.message}", problem.hint)
    return 0


def _describe(found: InstrumentationSet) -> int:
    print_line(f"{found.name}, version {found.version}, major code {found.major}: {found.summary}")
    if found.needs:
        print_line(f"needs: {', '.join(found.needs)}")
    for macro, names in found.modules.items():
        print_line(f"module {macro}: {', '.join(names)}")
    print_line()
    rows = [
        (
            probe.name,
            f"{found.major},{probe.minor}",
            probe.group,
            probe.type,
            " ".join(probe.engines),
            " ".join(f"{field.name}:{field.kind}" for field in probe.fields),
            probe.summary,
        )
        for probe in found.probes
    ]
    print_table(("probe", "code", "group", "type", "engines", "fields", "meaning"), rows)
    if found.views:
        print_line()
        print_table(("view", "question"), [(_command_of(found, each), each.question) for each in found.views])
    return 0


def _show(found: InstrumentationSet, view: SetView) -> int:
    """Print a view: its question, the command that runs it, and its program or query."""
    print_line(f"{view.question}    {_command_of(found, view)}")
    print_line()
    text = view.sql
    if view.file:
        from dprobes.preprocessor import read_source

        text = read_source(found.directory / view.file).text
    print_lines(text.strip("\n").splitlines())
    return 0


def _command_of(found: InstrumentationSet, view: SetView) -> str:
    return f"dprobes run {found.name}/{view.name}" if view.file else f"dprobes sql FILE {found.name}/{view.name}"


def _fit(path: Path) -> int:
    """Print which modules and places of a set this machine has; return 1 if the set cannot be used here."""
    from dprobes.sets.set_program import fits_of_modules, fits_of_places

    found, options = load_set(path), CompileOptions()
    files = files_of(path, None)
    with Progress("looking for the places"):
        fits = [*fits_of_modules(found, files), *fits_of_places(found, options, files)]
    if fits:
        rows, used = [], set()
        for each in fits:
            use = "no" if each.problem is not None else "yes" if each.macro in used else "yes, used"
            if each.problem is None:
                used.add(each.macro)
            rows.append((each.macro, each.place, use, each.problem or ""))
        print_table(("name", "alternative", "fits", "reason"), rows)
        if missing := [macro for macro in found.modules if macro not in used]:
            reason = f"{missing[0]} is not on this machine; name its file: -D {missing[0]}=FILE"
            print_line(f"the set '{found.name}' cannot be used here: {reason}")
            return 1
    diagnostics = Diagnostics()
    try:
        with Progress("checking the program"):
            programs = compile_programs(path, options)
            check_promises(path, options, diagnostics, files)
    except SourceError as error:
        console.write("\n".join(each.render() for each in error.diagnostics))
        print_line(f"the set '{found.name}' cannot be used here")
        return 1
    for program in programs:
        note_unsupported(program)
    if said := programs[0].render(*Severity):
        console.write(said)
    obstacles = _obstacles(found, programs)
    print_table(
        ("engine", "works", "reason"),
        [(name, "yes" if reason is None else "no", reason or "") for name, reason in obstacles.items()],
    )
    if None not in obstacles.values():
        print_line(f"the set '{found.name}' cannot be used here: no engine works")
        return 1
    print_line(f"the set '{found.name}' has no errors here: {len(found.probes)} probes")
    return 0


def _obstacles(found: InstrumentationSet, programs: Sequence[ResolvedProgram]) -> dict[str, str | None]:
    """Return the engines of a set, each with the reason why it cannot run all programs here, or None if it can."""
    needs = [need for each in programs for need in requirements(each.program, each.architecture)]
    knowledge = EngineOptions().knowledge
    rows = [engine_row(name) for name in dict.fromkeys(name for probe in found.probes for name in probe.engines)]
    return {row.name: obstacle(row, needs, row.support(knowledge)) for row in rows}
