"""The verbs ``examples``, ``doctor``, ``lsp`` and ``completion``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dprobes.cli.console import print_line, print_lines, print_table
from dprobes.cli.progress import Progress
from dprobes.errors import DprobesError, NotSupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.engine_interface import Finding

# The verb ``examples``: the programs that come with DProbes.


@click.command("examples")
@click.argument("name", required=False)
def examples_command(name: str | None) -> int:
    """
    List the example programs, or print the one called NAME.

    'dprobes run NAME' runs it, with its template if it has one. For one of your own, begin with a copy: 'dprobes
    examples NAME > my.rpn'.
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
    "--engine", "engine", metavar="NAME=ENDPOINT", help="Try what is behind an endpoint, such as a stub, instead."
)
def doctor_command(engine: str | None) -> int:
    """
    Print what works on this machine, with a reason and a remedy for each "no".

    Each feature is tried; nothing is concluded from version numbers. Exit status 1 means that no probes work at all.
    What stands behind an endpoint is let go on behind that.
    """
    from dprobes.engines.engine_registry import rows

    with Progress("trying what works here"):
        findings = [finding for row in rows() for finding in row.examine()] if engine is None else _behind(engine)
    for finding in findings:
        print_lines(_lines(finding))
    return 0 if all(finding.works for finding in findings if finding.essential) else 1


def _behind(engine: str) -> list[Finding]:
    """Return the findings about an endpoint; raise a usage error if nothing can be tried there."""
    from dprobes.engines.engine_registry import engine_row, named_engine, rows

    name, argument = named_engine(engine)
    row = engine_row(name)
    if argument is None or row.trial is None:
        known = ", ".join(each.usage for each in rows() if each.trial is not None)
        raise click.UsageError(f"'{engine}' names nothing that can be tried: give {known}")
    return row.examine_behind(argument)


def _lines(finding: Finding) -> Iterator[str]:
    text = f"{'yes' if finding.works else 'no ':3}  {finding.what}"
    if finding.detail:
        text += f": {finding.detail}"
    yield text
    if not finding.works and finding.remedy:
        yield f"     remedy: {finding.remedy}"


# The verb ``lsp``: a language server for editors.


@click.command("lsp")
def lsp_command() -> int:
    """
    Serve editors as a language server on standard input and output, for DProbes C and RPN.

    It says what is wrong while a program is written, completes modules, functions, fields and names, shows of a probe
    its RPN and what a hit costs, and finds definitions. It needs the package pygls.
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
    compinit; for fish write the output to ~/.config/fish/completions/dprobes.fish. Where dprobes is installed below a
    prefix that the shell looks in, as /usr/local, the scripts are there already.
    """
    from dprobes.cli import COMPLETE_VARIABLE
    from dprobes.cli.command_group import command_group
    from dprobes.cli.completions import script

    click.echo(script(shell, command_group, COMPLETE_VARIABLE))
    return 0
