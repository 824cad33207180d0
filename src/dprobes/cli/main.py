"""
The group of verbs, and the one place where errors become messages and exit statuses.

Exit status: 0 fine, 1 failed, 2 usage or program error. A verb's module is imported when the verb is used.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from typing import TYPE_CHECKING

import click

from dprobes.cli import console
from dprobes.escapes import escaped
from dprobes.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from click.shell_completion import CompletionItem

    from dprobes.cli.headstarts import HeadStart

__all__ = ["COMPLETE_VARIABLE", "VERBS", "buffer_standard_files", "command_group", "command_of", "run"]

VERBS = {
    "run": "Run a probe program on a command or a process.",
    "check": "Check a probe program and print errors and warnings.",
    "show": "Print a probe program: its probepoints, instructions, offsets and stack depths.",
    "list": "List what there is to probe: functions, tracepoints, a process's modules.",
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
    "stop": "Remove all programs at once.",
    "examples": "List the example programs that come with DProbes, or print one.",
    "systemd": "Have systemd start the probe manager when it is needed.",
    "doctor": "Print what works on this machine, and how to enable the rest.",
    "lsp": "Serve editors as a language server.",
    "completion": "Print a shell's completion script.",
}

COMPLETE_VARIABLE = "_DPROBES_COMPLETE"
"""What is in the environment when a shell asks for completions."""


def command_of(verb: str) -> click.Command:
    """Return the command of a verb, whose module is imported for that."""
    command = importlib.import_module(f"dprobes.cli.verbs.{verb.replace('-', '_')}").command
    assert isinstance(command, click.Command)
    return command


class _Verbs(click.Group):
    """A group that knows its commands' names and imports their modules only when they are used."""

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
        if args and args[0] not in VERBS and not args[0].startswith("-") and not ctx.resilient_parsing:
            from dprobes.diagnostics import did_you_mean

            hint = did_you_mean(args[0], VERBS)
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


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="dprobes %(version)s")
def command_group() -> None:
    """Dynamic Probes: a safe handler on any instruction of a running program."""


def _open_standard_files() -> None:
    """Give a missing standard file a descriptor that leads nowhere; another file would take its number else."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    # Python leaves out the objects of descriptors that were missing when it started.
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - lives as long as we
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123


def buffer_standard_files() -> None:
    """
    Have all be written that is printed, also with PYTHONUNBUFFERED.

    Without a buffer Python forgets what a write leaves over that a signal has interrupted; with one it goes on. Only
    for who owns the process: the files that it has had are closed with the new ones.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and isinstance(stream.buffer, io.RawIOBase):
            whole = io.BufferedWriter(stream.buffer)
            setattr(sys, name, io.TextIOWrapper(whole, stream.encoding, stream.errors, line_buffering=True))


def _ours(arguments: Sequence[str]) -> tuple[Sequence[str], bool]:
    """Return our line for one that may be written for the original, and whether it was."""
    from dprobes.cli.original import OriginalLineError, is_original, translate

    if not is_original(arguments):
        return arguments, False
    try:
        translated = translate(arguments, klog_is_writable=os.access("/dev/kmsg", os.W_OK))
    except OriginalLineError as error:
        raise click.UsageError(str(error)) from None
    for note in translated.notes:
        console.note(note)
    return translated.arguments, True


def run(arguments: Sequence[str], head_start: HeadStart | None = None) -> int:
    """Carry out a command line, which may have a head start, and return the exit status."""
    from dprobes.errors import DprobesError, InternalError, SourceError, reason_of

    _open_standard_files()
    is_translated = False
    try:
        if arguments and arguments[0].startswith("-"):
            arguments, is_translated = _ours(arguments)
        if COMPLETE_VARIABLE in os.environ:
            from dprobes.cli.completions import register

            register()
        result = command_group.main(list(arguments), prog_name="dprobes", standalone_mode=False, obj=head_start)
    except click.UsageError as error:
        _show_usage_error(error)
        return 2
    except click.ClickException as error:
        console.error(error.format_message())
        return 2
    except click.Abort:
        return 130
    except SourceError as error:
        console.write(error.message)
        _show_translation(arguments, is_shown=is_translated)
        return 2
    except InternalError as error:
        console.write(f"dprobes: error: internal error: {error.message}")
        console.write("hint: this is a bug in dprobes; please report it with this output")
        return 1
    except DprobesError as error:
        console.error(error.message, error.hint)
        _show_translation(arguments, is_shown=is_translated)
        return 1
    except OSError as error:
        if error.filename is not None:
            console.error(f"'{os.fsdecode(error.filename)}': {reason_of(error)}")
            return 1
        if not _is_of_output(error):
            console.error(reason_of(error), "dprobes doctor says what this machine allows")
            return 1
        # Python would complain again at exit.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            console.error(f"standard output: {reason_of(error)}")
        return 1
    return result if isinstance(result, int) else 0


def _show_translation(arguments: Sequence[str], *, is_shown: bool) -> None:
    """Say what our form of the original's line is: what hints advise may be an option of that form only."""
    if is_shown:
        import shlex

        from dprobes.cli.original import ORIGINAL_OPTION

        line = shlex.join(argument for argument in arguments if argument != ORIGINAL_OPTION)
        console.note(f"in today's form, which takes all options, this line is: dprobes {line}")


def _show_usage_error(error: click.UsageError) -> None:
    """Print what click prints; what it quotes is escaped."""
    if error.ctx is not None:
        usage, path = error.ctx.get_usage(), error.ctx.command_path
        console.write(f"{usage}\nTry '{path} --help' for help.\n")
    console.write(f"Error: {escaped(error.format_message())}")


def _is_of_output(error: OSError) -> bool:
    """Return whether an error is one of writing results, which click does, or of a pipe that nobody reads any more."""
    if isinstance(error, BrokenPipeError):
        return True
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    module: str = "" if innermost is None else innermost.tb_frame.f_globals.get("__name__", "")
    return module.partition(".")[0] == "click"
