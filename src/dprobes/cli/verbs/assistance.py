"""The verbs ``examples``, ``doctor``, ``lsp`` and ``completion``."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

import click

from dprobes.cli.console import Progress, print_line, print_lines, print_table
from dprobes.engines.engine_interface import Area
from dprobes.errors import DprobesError, NotSupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.engines.engine_interface import Finding

# The verb ``examples``: the programs that come with DProbes.


@click.command("examples")
@click.argument("name", required=False)
def examples_command(name: str | None) -> int:
    """
    List the example programs, or print the one called NAME.

    'dprobes run NAME' runs it, with its template if it has one. To write a program of your own, begin with a copy:
    'dprobes examples NAME > my.rpn'.
    """
    from dprobes.cli.option_values import all_examples, example_directory, find_example
    from dprobes.diagnostics import did_you_mean

    directory = example_directory()
    if directory is None:
        raise DprobesError("this installation has no examples", hint="install dprobes again: its wheel has them")
    if name is None:
        print_table(("name", "what it shows"), [(each.name, each.summary) for each in all_examples()])
        print_line(f"They are in {directory}")
        return 0
    if (path := find_example(name)) is None:
        hint = did_you_mean(name, [each.name for each in all_examples()])
        raise click.UsageError(f"there is no example '{name}'" + (f"; {hint}" if hint else ""))
    print_lines(path.read_text(encoding="utf-8").splitlines())
    return 0


@click.command("doctor")
@click.option(
    "--engine",
    "engine",
    metavar="NAME=ENDPOINT",
    help="Test an engine's target instead of this machine, such as the stub of gdbserver or QEMU.",
)
def doctor_command(engine: str | None) -> int:
    """
    Test the features that engines need, and print those that work, with a reason and a remedy for each "no".

    Each feature is tried; nothing is concluded from version numbers. The exit status is 1 if no engine can run probes.
    With --engine the target of the endpoint is stopped for the tests, and continues after them.
    """
    from dprobes.engines.engine_registry import rows

    with Progress("testing this machine" if engine is None else "testing the target"):
        findings = [finding for row in rows() for finding in row.examine()] if engine is None else _behind(engine)
    if engine is None:
        lines = [line for area in Area for line in _section(area, findings)]
        print_lines([*lines, *_conclusion(findings)])
    else:
        print_lines(line for finding in findings for line in _lines(finding))
    return 0 if all(finding.works for finding in findings if finding.essential) else 1


def _behind(engine: str) -> list[Finding]:
    """
    Return the findings about the target of ``engine``, a name with an endpoint such as ``gdb=HOST:PORT``.

    Raise a usage error if no feature can be tried there.
    """
    from dprobes.engines.engine_registry import engine_row, named_engine, rows

    name, argument = named_engine(engine)
    row = engine_row(name)
    if argument is None or row.trial is None:
        known = ", ".join(each.usage for each in rows() if each.trial is not None)
        raise click.UsageError(f"'{engine}' cannot be tested: expected {known}")
    return row.examine_behind(argument)


def _section(area: Area, findings: Sequence[Finding]) -> Iterator[str]:
    """Yield lines with the findings of an area of the system, below the area's name."""
    if mine := [finding for finding in findings if finding.area is area]:
        yield f"{area.value}:"
        for finding in mine:
            yield from _lines(finding)
        yield ""


def _lines(finding: Finding) -> Iterator[str]:
    text = f"{'yes' if finding.works else 'no ':3}  {finding.what}"
    yield from _wrapped(f"{text}: {finding.detail}" if finding.detail else text)
    if not finding.works and finding.remedy:
        yield from _wrapped(f"     remedy: {finding.remedy}")


def _wrapped(text: str) -> list[str]:
    """Return a line as lines of the terminal's width, or unchanged if standard output is not a terminal."""
    if not sys.stdout.isatty():
        return [text]
    width = shutil.get_terminal_size().columns
    return textwrap.wrap(text, width, subsequent_indent=" " * 7, break_long_words=False, break_on_hyphens=False)


def _conclusion(findings: Sequence[Finding]) -> Iterator[str]:
    """Iterate over lines with the possible uses of dprobes now, and the remedy that would add most."""
    uses = [(finding.works, finding.use) for finding in findings if finding.use is not None]
    yield "what you can do now:" if any(works for works, _ in uses) else "no probe works here"
    for works, use in sorted(uses, key=lambda pair: -pair[1].gain):
        if works:
            yield f"     {use.text}"
            yield f"         {use.command}"
    missing = [finding for finding in findings if not finding.works and finding.remedy]
    if missing:
        most = max(missing, key=lambda finding: (finding.essential, 0 if finding.use is None else finding.use.gain))
        gain = most.what if most.use is None else most.use.text
        yield ""
        yield "what would add most:"
        yield from _wrapped(f"     {gain}: {most.remedy}")


# The verb ``lsp``: a language server for editors.


@click.command("lsp")
def lsp_command() -> int:
    """
    Serve editors as a language server on standard input and output, for DProbes C and RPN.

    The server reports errors and warnings while you type, completes names, shows the RPN of a probe and the cost of a
    hit, and finds definitions. It needs the package pygls.
    """
    try:
        from dprobes.cli.languageserver.language_server import create_server
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("pygls", "lsprotocol"):
            raise
        raise NotSupportedError(
            f"the language server needs the package {error.name}", hint="pip install 'dprobes[lsp]'"
        ) from error
    create_server().start_io()
    return 0


# The verb ``completion``: the script for completion of command lines in a shell.


SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def completion_command(shell: str) -> int:
    """
    Print the script with which SHELL completes verbs, options, files, groups, types, modules, symbols and names.

    For bash put 'eval "$(dprobes completion bash)"' into ~/.bashrc; for zsh put the same with zsh into ~/.zshrc, after
    compinit; for fish write the output to ~/.config/fish/completions/dprobes.fish. If dprobes is installed below a
    prefix in which the shell looks for completions, such as /usr/local, the scripts are installed already.
    """
    from dprobes.cli import COMPLETE_VARIABLE
    from dprobes.cli.command_group import command_group
    from dprobes.cli.completions import script

    click.echo(script(shell, command_group, COMPLETE_VARIABLE))
    return 0
