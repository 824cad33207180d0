"""
Execution of a command line, and the only place at which errors become messages and exit statuses.

Exit status: 0 success, 1 failure, 2 usage or program error, 130 interrupted. click parses command lines.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING

from dprobes.cli import COMPLETE_VARIABLE, console
from dprobes.escapes import escaped
from dprobes.standard_files import give_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    import click

__all__ = ["run"]

_WRITERS = ("dprobes.cli.console", "dprobes.standard_files")
"""The modules that write results."""

_INTERRUPTED = 130
"""Exit status that shells report for a command that SIGINT has ended: 128 + SIGINT."""

_NO_THREAD = "can't start new thread"
"""Python's error message if there is no memory for a thread's stack."""


def _open_standard_files() -> None:
    """Open /dev/null for missing standard descriptors. Otherwise, another file would get their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    # Python creates no objects for descriptors that were missing at its start.
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - lives as long as we
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123


def _ours(arguments: Sequence[str]) -> tuple[Sequence[str], bool]:
    """Return the arguments in the modern form, and whether they were in that of the original."""
    from dprobes.cli.original_lines import OriginalLineError, is_original, translate

    if not is_original(arguments):
        return arguments, False
    try:
        translated = translate(arguments, klog_is_writable=os.access("/dev/kmsg", os.W_OK))
    except OriginalLineError as error:
        from dprobes.cli.option_values import usage_error

        raise usage_error(str(error)) from None
    for note in translated.notes:
        console.note(note)
    return translated.arguments, True


def run(arguments: Sequence[str]) -> int:
    """Execute a command line of ``dprobes``, given without the program's name, and return the exit status."""
    from dprobes.errors import DprobesError, InternalError, SourceError, reason_of

    _open_standard_files()
    is_translated = False
    try:
        if arguments and arguments[0].startswith("-"):
            arguments, is_translated = _ours(arguments)
        result = _dispatch(arguments)
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
        if error.errno == errno.ENOMEM:
            console.error("there is not enough memory", "'ulimit -v' shows the limit of the address space")
            return 1
        if not _is_of_output(error):
            console.error(reason_of(error), "'dprobes doctor' shows what works on this machine")
            return 1
        give_up(sys.stdout)  # prevents Python's own error message at exit
        if not isinstance(error, BrokenPipeError):
            console.error(f"standard output: {reason_of(error)}")
        return 1
    except SystemExit as error:  # click's, with status 1, if the reader of the output has gone
        return error.code if isinstance(error.code, int) else 1
    except Exception as error:
        if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
            console.error("there is not enough memory", "'ulimit -v' shows the limit of the address space")
            return 1
        if (status := _status_of_usage(error)) is None:
            raise
        return status
    return result if isinstance(result, int) else 0


_OPTIONS_OF_OTHERS = {
    "-f": "--format", "--json": "--format json", "-d": "--duration", "--timeout": "--duration", "-t": "--duration",
    "-F": "--format", "-n": "--no-follow", "-u": "--uid", "-o": "--output", "-I": "--include", "--args": "-c",
    "--command": "-c", "--unsafe": "--allow-write", "--process": "-p", "-E": "-e",
    "--text": "-e", "--event": "-e",
}  # fmt: skip
"""Options of bpftrace, perf, strace and others, with the equivalent options of verbs."""


def _dispatch(arguments: Sequence[str]) -> object:
    if COMPLETE_VARIABLE in os.environ:
        from dprobes.cli.completions import register

        register()
    from dprobes.cli.command_group import command_group

    return command_group.main(list(arguments), prog_name="dprobes", standalone_mode=False)


def _status_of_usage(error: Exception) -> int | None:
    """Print a usage error of click, and return the exit status; return None for other errors."""
    if "click" not in sys.modules:
        return None
    import click

    match error:
        case click.UsageError():
            _show_usage_error(error)
            return 2
        case click.ClickException():
            console.error(error.format_message())
            return 2
        case click.Abort():
            return _INTERRUPTED
    return None


def _show_translation(arguments: Sequence[str], *, is_shown: bool) -> None:
    """
    Print the command line of this version that corresponds to one of the original DProbes.

    Hints in messages may propose options that only this version has. Without ``is_shown``, print nothing.
    """
    if is_shown:
        import shlex

        from dprobes.cli.original_lines import ORIGINAL_OPTION

        line = shlex.join(argument for argument in arguments if argument != ORIGINAL_OPTION)
        console.note(f"the present form, which has all options, is: dprobes {line}")


def _show_usage_error(error: click.UsageError) -> None:
    """Print click's usage error; control characters in quoted arguments are escaped."""
    if error.ctx is not None:
        usage, path = error.ctx.get_usage(), error.ctx.command_path
        console.write(f"{usage}\nTry '{path} --help' for help.\n")
    import click

    message = error.format_message()
    if isinstance(error, click.NoSuchOption) and (ours := _option_hint(error)) is not None:
        message = f"{message.partition(' (Did you mean')[0].partition(' Did you mean')[0]} Did you mean {ours}?"
    console.write(f"Error: {escaped(message)}")


def _option_hint(error: click.NoSuchOption) -> str | None:
    """Return a verb's equivalent of another tool's option, or None for other options."""
    ours = _OPTIONS_OF_OTHERS.get(error.option_name)
    known = {name for each in (error.ctx.command.params if error.ctx is not None else ()) for name in each.opts}
    return ours if ours is not None and ours.split()[0] in known else None


def _is_of_output(error: OSError) -> bool:
    """Return whether an error occurred while writing results, in click or dprobes, or is that of a broken pipe."""
    if isinstance(error, BrokenPipeError):
        return True
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    module: str = "" if innermost is None else innermost.tb_frame.f_globals.get("__name__", "")
    return module.partition(".")[0] == "click" or module in _WRITERS
