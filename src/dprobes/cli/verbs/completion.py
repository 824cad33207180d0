"""The verb ``completion``: the script that lets a shell complete command lines."""

from __future__ import annotations

import click

__all__ = ["command"]

SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> int:
    """
    Print the script with which SHELL completes verbs, options, files, groups, types, modules, symbols and names.

    For bash put 'eval "$(dprobes completion bash)"' into ~/.bashrc; for zsh put the same with zsh into ~/.zshrc, after
    compinit; for fish write the output to ~/.config/fish/completions/dprobes.fish. Where dprobes is installed below a
    prefix that the shell looks in, as /usr/local, the scripts are there already.
    """
    from dprobes.cli import COMPLETE_VARIABLE
    from dprobes.cli.commandgroup import command_group
    from dprobes.cli.completions import script

    click.echo(script(shell, command_group, COMPLETE_VARIABLE))
    return 0
