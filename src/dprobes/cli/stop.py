"""The verb ``stop``: everything off at once."""

from __future__ import annotations

import click

from dprobes.cli import console
from dprobes.cli.managed import client
from dprobes.errors import ManagerError

__all__ = ["command"]

_PATIENCE = 10.0
"""Seconds that the manager has to take everything away, until it is killed."""


@click.command("stop")
@click.option("--manager", "ends", is_flag=True, help="End the probe manager as well, and its global variables.")
def command(ends: bool) -> int:
    """
    Remove every probepoint at once: the emergency key.

    A manager that does not answer is killed; the kernel and the tracers take its probepoints away then.
    """
    manager = client(patience=_PATIENCE)
    try:
        with manager:
            stopped = manager.stop(ends=ends)
    except ManagerError as error:
        if (pid := manager.kill()) is None:
            raise
        console.warning(f"{error.message}; killed process {pid}")
        return 0
    click.echo(f"stopped {stopped.count} program{'s' if stopped.count != 1 else ''}")
    if stopped.unfinished:
        manager.kill()
        console.warning(f"these did not end, and the manager was killed: {', '.join(stopped.unfinished)}")
    return 0
