"""The verb ``apply``: have the manager insert a compiled program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dprobes.api.compiledfile import compiled_bytes
from dprobes.cli.managerinsertion import insert, insertion_from, insertion_options
from dprobes.cli.options import PROGRAM_FILE
from dprobes.cli.scopeoptions import scope_options

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["command"]


@click.command("apply")
@click.argument("file", type=PROGRAM_FILE)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND ...]")
@scope_options
@insertion_options
@click.option("--allow-write", is_flag=True, help="Allow instructions that change or stop the target.")
def command(file: Path, arguments: tuple[str, ...], **options: Any) -> int:
    """
    Insert the compiled probe program FILE (a PPDF, see 'dprobes build') through the probe manager.

    It needs neither symbols nor sources: the module must be a build that FILE was compiled for. The instructions at the
    probepoints are compared with those of that build.
    """
    where = insertion_from(options, arguments)
    return insert(compiled_bytes(file), where, options, allow_write=options["allow_write"])
