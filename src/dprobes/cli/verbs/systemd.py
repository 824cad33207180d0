"""The verb ``systemd``: configure systemd to start the probe manager on demand."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dprobes.cli import console
from dprobes.cli.console import print_line
from dprobes.errors import ManagerError, PrivilegeError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.manager.systemd_units import InstalledUnit

__all__ = ["systemd_command"]

_SOCKET, _SERVICE = "dprobes.socket", "dprobes.service"
_BOOTED = Path("/run/systemd/system")
"""A directory that exists exactly if systemd runs the system (sd_booted(3))."""


@click.group("systemd")
def systemd_command() -> None:
    """
    Have systemd start the probe manager when it is needed.

    systemd listens on the manager's socket, and starts the manager at the first 'dprobes insert'.
    """


def _options(function: Callable[..., int]) -> Callable[..., int]:
    function = click.option(
        "--directory", type=click.Path(path_type=Path), metavar="DIRECTORY",
        help="Write the unit files to this directory, for packages and images; systemd is not notified.",
    )(function)  # fmt: skip
    return click.option("--user", "of_user", is_flag=True, help="Act on your own manager instead of the system's.")(
        function
    )


@systemd_command.command("install")
@_options
def install(of_user: bool, directory: Path | None) -> int:
    """Write the unit files, and make systemd listen for 'dprobes insert', now and after each boot."""
    for unit in _units(of_user, directory):
        print_line(f"{'wrote' if unit.write() else 'unchanged:'} {unit.path}")
    if directory is None and _has_systemd():
        _systemctl(of_user, "daemon-reload")
        _systemctl(of_user, "enable", "--now", _SOCKET)
        print_line(f"systemd listens for 'dprobes insert' ({_SOCKET})")
    return 0


@systemd_command.command("remove")
@_options
def remove(of_user: bool, directory: Path | None) -> int:
    """Stop the manager, and remove what 'dprobes systemd install' has written."""
    found = _units(of_user, directory)
    is_told = directory is None and _has_systemd()
    if is_told and any(unit.path.exists() for unit in found):
        _systemctl(of_user, "disable", "--now", _SOCKET, _SERVICE)
    for unit in found:
        print_line(f"{'removed' if unit.remove() else 'not there:'} {unit.path}")
    if is_told:
        _systemctl(of_user, "daemon-reload")
    return 0


def _units(of_user: bool, directory: Path | None) -> Sequence[InstalledUnit]:
    from dprobes.manager.systemd_units import manager_command, unit_directory, units

    if directory is None:
        if not of_user and os.geteuid() != 0:
            raise PrivilegeError(
                "only root may change the system's units", hint="use sudo, or --user for a manager of your own"
            )
        directory = unit_directory(os.environ, of_user=of_user)
    return units(directory, manager_command(), of_user=of_user)


def _has_systemd() -> bool:
    if _BOOTED.is_dir() and shutil.which("systemctl") is not None:
        return True
    console.note("this system does not run systemd, which was not notified")
    return False


def _systemctl(of_user: bool, *arguments: str) -> None:
    line = ["systemctl", *(("--user",) if of_user else ()), *arguments]
    done = subprocess.run(line, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        raise ManagerError(f"'{' '.join(line)}' failed: {done.stderr.strip() or done.stdout.strip()}")
