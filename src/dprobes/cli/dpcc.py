"""
``dpcc``: the command of the DProbes C compiler of 2002, with its options.

::

    dpcc [-achp?] [-I DIRECTORY] [-D NAME[=VALUE]] [-o FILE] FILE.dpc

It writes RPN source. The modern equivalent, ``dprobes build``, writes a file for other machines.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from dprobes.cli import console
from dprobes.cli.option_values import compile_options
from dprobes.cli.shared_options import PROGRAM, PROGRAM_FILE
from dprobes.diagnostics import Diagnostics, Severity

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = ["command", "main", "run"]

_RPN = ".rpn"


@click.command("dpcc", context_settings={"help_option_names": ["-h", "-?", "--help"], "max_content_width": 100})
@click.argument("file", type=PROGRAM)
@click.option("-a", "as_tree", is_flag=True, help="Print the syntax tree, too.")
@click.option("-c", "comments", is_flag=True, help="Put the lines of C into the RPN source as comments.")
@click.option("-p", "forgiving", is_flag=True, help="Continue after errors of the preprocessor.")
@click.option(
    "-I", "includes", multiple=True, type=PROGRAM_FILE, metavar="DIRECTORY", help="Search included files here."
)
@click.option("-D", "defines", multiple=True, metavar="NAME[=VALUE]", help="Define a macro.")
@click.option(
    "-o", "output", type=PROGRAM_FILE, metavar="FILE",
    help="Write there, with - to standard output; the default is FILE's name with .rpn in the place of .dpc.",
)  # fmt: skip
def command(
    file: Path,
    as_tree: bool,
    comments: bool,
    forgiving: bool,
    includes: tuple[Path, ...],
    defines: tuple[str, ...],
    output: Path | None,
) -> int:
    """
    Compile FILE, a program in DProbes C, to RPN source.

    'dprobes run FILE' compiles and runs it in one step; 'dprobes build FILE' makes a compiled program.
    """
    from dprobes.dpc.compiler import Passes, compile_text, tree_lines
    from dprobes.dpc.modules.probed_modules import ModuleFiles
    from dprobes.preprocessor import preprocess, read_source

    options = compile_options(defines, includes, None, allow_write=True)
    of_text = Diagnostics()
    source = read_source(file)
    text = preprocess(source, of_text, defines=options.defines, include_dirs=options.include_dirs)
    if forgiving:
        lowered = [replace(each, severity=Severity.WARNING) for each in of_text]
        of_text = Diagnostics()
        of_text.extend(lowered)
    of_text.raise_if_errors()
    diagnostics = Diagnostics()
    diagnostics.extend(of_text)
    passes = Passes()
    files = ModuleFiles()
    found, tool = compile_text(
        text,
        diagnostics,
        word_size_of=files.word_size_of,
        module_of=files.module_of,
        allow_write=True,
        note=passes.note,
    )
    if as_tree:
        click.echo("\n".join(tree_lines(passes.found["tree"])))
    if not any(each.definitions for each in found):
        diagnostics.error(text.span(0, 0), "there is no probe")
        diagnostics.raise_if_errors()
    if shown := "\n".join(each.render() for each in diagnostics):
        console.write(shown)
    output = output or file.with_suffix(_RPN)
    if output == file:
        raise click.UsageError(f"'{file}' would be written over; name another file with -o")
    if len(found) > 1 and str(output) != "-":
        console.note(f"the program is for {len(found)} modules: there is a file for each")
    for number, compilation in enumerate(found, 1):
        lines = [line.text for line in compilation.lines if comments or not line.text.lstrip().startswith("//")]
        rpn = "\n".join((*lines, ""))
        if str(output) == "-":
            click.echo(rpn, nl=False)
        else:
            place = output if number == 1 else output.with_name(f"{output.stem}.{number}{output.suffix}")
            place.write_text(rpn, encoding="utf-8")
    _say_what_is_missing(is_printing=any(each.templates for each in found), has_blocks=tool is not None)
    return 0


def _say_what_is_missing(*, is_printing: bool, has_blocks: bool) -> None:
    """Print a note about the parts of a program that RPN source lacks: formats of printf and blocks of the tool."""
    missing = [
        *(["the formats of 'printf'"] if is_printing else []),
        *(["'begin', 'every' and 'end'"] if has_blocks else []),
    ]
    if missing:
        console.note(f"RPN source does not have {' and '.join(missing)}", "'dprobes run FILE.dpc' has all of it")


def run(arguments: Iterable[str]) -> int:
    """Execute a command line and return the exit status."""
    from dprobes.errors import DprobesError, SourceError, reason_of

    try:
        result = command.main(list(arguments), prog_name="dpcc", standalone_mode=False)
    except click.ClickException as error:
        console.write(f"dpcc: error: {error.format_message()}")
        return 2
    except SourceError as error:
        console.write(error.message)
        return 2
    except DprobesError as error:
        console.error(error.message, error.hint)
        return 1
    except OSError as error:
        console.error(f"'{error.filename}': {reason_of(error)}" if error.filename else reason_of(error))
        return 1
    return result if isinstance(result, int) else 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile the file in the command line, and exit with the status of ``run``; None means ``sys.argv``."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    main()
