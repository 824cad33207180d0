"""The group of verbs. A verb's module is imported when the verb is used."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dprobes.cli import COMPLETE_VARIABLE
from dprobes.version import __version__

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = ["VERBS", "command_group", "command_of"]

_OF_OTHER_TOOLS = {
    "trace": "run", "record": "run", "probe": "run", "attach": "run", "exec": "run", "start": "run", "add": "insert",
    "load": "insert", "ls": "list", "functions": "list", "delete": "remove", "detach": "remove", "report": "log",
    "dump": "log", "stat": "run", "status": "query", "info": "query", "ps": "query", "compile": "build",
    "top": "run --top",
    "strace": "run", "ltrace": "run", "bpftrace": "run", "uninstall": "remove", "kill": "stop", "symbols": "list",
    "disassemble": "locate", "vars": "getvars",
}  # fmt: skip
"""Verbs of perf, bpftrace, GDB and other tools, with the equivalent ones of dprobes."""

VERBS = {
    "run": "Run a probe program on a command or a process.",
    "check": "Check a probe program and print errors and warnings.",
    "show": "Print a probe program: its probepoints, instructions, offsets and stack depths.",
    "list": "List what can be probed: functions, tracepoints, a process's modules.",
    "locate": "Print the values of 'offset =' and 'opcode =' for a place in a module.",
    "build": "Compile a probe program for machines that have neither its source nor its module's symbols.",
    "convert": "Convert a script of bpftrace to DProbes C.",
    "insert": "Insert a probe program in the background, through the probe manager.",
    "apply": "Insert a compiled probe program (PPDF) in the background.",
    "remove": "Remove inserted programs, or single probepoints.",
    "query": "Print inserted programs, their states and counts.",
    "getvars": "Print or reset the variables of inserted programs.",
    "log": "Print the records of the probe manager, or of trace files.",
    "format": "Print the records of a trace file or stream, using templates.",
    "sql": "Query the records of trace files and Parquet files in SQL.",
    "log-target": "Add, remove and list log targets.",
    "profile": "Print calls, inclusive and exclusive times of the functions of a module.",
    "storage": "Print which functions read and write the fields of a structure.",
    "stop": "Remove all programs of the probe manager at once.",
    "patch": "Replace a function of a running process by one of a shared object.",
    "sets": "List instrumentation sets, the probes of a set, or check a set on this machine.",
    "examples": "List the example programs that come with DProbes, or print one.",
    "systemd": "Have systemd start the probe manager when it is needed.",
    "doctor": "Print what works on this machine, and how to enable the rest.",
    "lsp": "Serve editors as a language server.",
    "completion": "Print a shell's completion script.",
}

_MODULES = {
    "apply": "insert",
    "list": "locate",
    **dict.fromkeys(("query", "getvars", "remove", "stop", "log-target"), "manager_verbs"),
    **dict.fromkeys(("examples", "doctor", "lsp", "completion"), "assistance"),
}
"""The modules of verbs that differ from the verb's name."""


def command_of(verb: str) -> click.Command:
    """Return the click command of a verb such as ``run``. Its module is imported only now."""
    name = verb.replace("-", "_")
    command = getattr(importlib.import_module(f"dprobes.cli.verbs.{_MODULES.get(verb, name)}"), f"{name}_command")
    assert isinstance(command, click.Command)
    return command


class _Verbs(click.Group):
    """A group that lists its commands by name and imports their modules only when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = command_of(cmd_name)
        if COMPLETE_VARIABLE in os.environ:
            from dprobes.cli.completions import prepare

            prepare(command, cmd_name)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        if incomplete.startswith("-"):
            return click.Command.shell_complete(self, ctx, incomplete)
        from click.shell_completion import CompletionItem

        return [CompletionItem(verb, help=text) for verb, text in VERBS.items() if verb.startswith(incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] == "help" and not ctx.resilient_parsing:
            if len(args) == 1:
                click.echo(ctx.get_help())
                ctx.exit()
            args = [args[1], "--help"]
        if args and args[0] not in VERBS and not args[0].startswith("-") and not ctx.resilient_parsing:
            from dprobes.diagnostics import did_you_mean

            known = _OF_OTHER_TOOLS.get(args[0])
            hint = f"did you mean '{known}'?" if known is not None else did_you_mean(args[0], VERBS)
            if hint is None and ("{" in args[0] or ":" in args[0]):
                hint = "the text of a program is given with -e: dprobes run -e 'TEXT'"
            elif hint is None and _is_program(args[0]):
                hint = f"a program is run by 'dprobes run {args[0]}'"
            raise click.UsageError(f"there is no verb '{args[0]}'" + (f"; {hint}" if hint else ""))
        return super().resolve_command(ctx, args)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help_text(ctx, formatter)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write(f'{"":{formatter.current_indent}}A first probe:  dprobes run malloc -c "ls /"\n')

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


def _is_program(word: str) -> bool:
    """Return whether a word is the file of a program, or the name of an example."""
    from dprobes.cli.option_values import find_example

    return Path(word).is_file() or find_example(word) is not None


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="dprobes %(version)s")
def command_group() -> None:
    """Dynamic Probes: a safe handler on any instruction of a running program."""
