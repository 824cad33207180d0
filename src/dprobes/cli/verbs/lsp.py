"""The verb ``lsp``: a language server for editors."""

from __future__ import annotations

import click

from dprobes.errors import NotSupportedError

__all__ = ["command"]


@click.command("lsp")
def command() -> int:
    """
    Serve editors as a language server on standard input and output, for DProbes C and RPN.

    It says what is wrong while a program is written, completes modules, functions, fields and names, shows of a probe
    its RPN and what a hit costs, and finds definitions. It needs the package pygls.
    """
    try:
        from dprobes.cli.languageserver.server import create_server
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("pygls", "lsprotocol"):
            raise
        raise NotSupportedError(
            f"the language server needs the package {error.name}", hint="pip install 'dprobes[lsp]'"
        ) from error
    create_server().start_io()
    return 0
