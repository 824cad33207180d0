"""The verb ``stop``: everything off at once."""

from __future__ import annotations

import click

from dprobes.cli import console
from dprobes.cli.managed import client
from dprobes.cli.output.textoutput import print_line
from dprobes.engines.registry import rows
from dprobes.errors import ManagerError

__all__ = ["command"]

_PATIENCE = 10.0
"""Seconds that the manager has to answer, and then to end by itself, until it is killed."""


@click.command("stop")
@click.option("--manager", "ends", is_flag=True, help="Also end the probe manager, and with it its global variables.")
@click.option("--left", "is_about_left", is_flag=True, help="Only take out what killed runs have left in processes.")
def command(ends: bool, is_about_left: bool) -> int:
    """
    Remove all probepoints at once: the kill switch.

    A manager that does not answer in time is terminated, and killed if it does not end; then the kernel and the tracers
    remove its probepoints.

    Of a run with --engine inline a process may keep jumps and memory, if all processes of that run were killed at
    once; they do no harm. The next run on that process takes them out, or --left, which looks at all processes.
    """
    if is_about_left:
        for row in rows():
            for left in row.remove_left():
                print_line(f"process {left.pid}: {left.said}")
        return 0
    manager = client(patience=_PATIENCE)
    try:
        with manager:
            stopped = manager.stop(ends=ends)
    except ManagerError as error:
        if (killed := manager.kill(_PATIENCE)) is None:
            raise
        console.warning(f"{error.message}; {'killed' if killed.by_force else 'ended'} process {killed.pid}")
        return 0
    print_line(f"stopped {stopped.count} program{'s' if stopped.count != 1 else ''}")
    if stopped.unfinished:
        manager.kill(_PATIENCE)
        console.warning(f"these did not end in time, so the manager was terminated: {', '.join(stopped.unfinished)}")
    return 0
