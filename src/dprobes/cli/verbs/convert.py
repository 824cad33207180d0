"""The verb ``convert``: a script of bpftrace as a program in DProbes C."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dprobes.cli import console
from dprobes.cli.output.textoutput import print_lines
from dprobes.errors import DprobesError, reason_of

__all__ = ["command"]


@click.command("convert")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True), required=False)
@click.option("-e", "text", metavar="TEXT", help="Convert this script instead of a file.")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the program to FILE.")
def command(file: Path | None, text: str | None, output: Path | None) -> int:
    """
    Convert FILE, a script of bpftrace, to DProbes C, and print the program.

    What is not quite the same is noted. What has no like is an error with its place, and nothing is printed then. A
    comment in front of the program says how it is run.
    """
    from dprobes.bpftrace.conversion import convert
    from dprobes.cli.bpftracemachine import ThisMachine
    from dprobes.diagnostics import Diagnostics
    from dprobes.source import SourceFile

    if (text is None) == (file is None):
        raise click.UsageError("name the file of a script, or give its text with -e TEXT")
    source = SourceFile("-e", text) if text is not None else SourceFile(str(file), _read(file or Path("-")))
    diagnostics = Diagnostics()
    converted = convert(source, ThisMachine(), diagnostics)
    if len(diagnostics):
        console.write(diagnostics.render())
    name = output.name if output is not None else "FILE.dpc"
    head = f"//   {' '.join(('dprobes run', name, *converted.options))}"
    program = (
        f"// Converted from {'a script' if text is not None else source.name} of bpftrace\n{head}\n{converted.text}"
    )
    if output is None:
        print_lines(program.splitlines())
        return 0
    try:
        output.write_text(program, encoding="utf-8")
    except OSError as error:
        raise DprobesError(f"cannot write '{output}': {reason_of(error)}") from error
    return 0


def _read(file: Path) -> str:
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return data.decode()
    except OSError as error:
        raise DprobesError(f"cannot read '{file}': {reason_of(error)}") from error
    except UnicodeDecodeError as error:
        raise DprobesError(f"'{file}' is no text: byte {error.start} is no UTF-8") from error
