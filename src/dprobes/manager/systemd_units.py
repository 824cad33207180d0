"""
Units with which systemd starts the probe manager: their templates and their installation.

A wheel installs them below the installation prefix, where systemd does not search, and with a command that systemd does
not find (``docs/reference/manager.md``). An *installed* unit contains the path of the command.
"""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import ManagerError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["UNIT_NAMES", "InstalledUnit", "manager_command", "unit_directory", "units"]

UNIT_NAMES = ("dprobes.service", "dprobes.socket")
_SYSTEM_DIRECTORY = Path("/etc/systemd/system")
_START, _OURS = "ExecStart=", "Documentation=man:dprobes(8)"
_SPECIAL = {"\\": "\\\\", '"': '\\"', "$": "$$", "%": "%%"}
"""Characters with a special meaning in a command line (systemd.service(5), systemd.unit(5), "Specifiers")."""


@dataclass(frozen=True, slots=True)
class InstalledUnit:
    """A unit file, with its text to be installed at ``path``."""

    path: Path
    text: str

    def write(self) -> bool:
        """
        Write the file unless it is up to date, and return whether it was written.

        Raise ``ManagerError`` for an existing file that DProbes has not created, or if it cannot be written.
        """
        if self._present_text() == self.text:
            return False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(self.text, encoding="utf-8")
        except OSError as error:
            raise ManagerError(f"cannot write '{self.path}': {error.strerror}") from None
        return True

    def remove(self) -> bool:
        """Remove the file, and return whether it existed; raise the same ``ManagerError`` as ``write``."""
        if self._present_text() is None:
            return False
        try:
            self.path.unlink()
        except OSError as error:
            raise ManagerError(f"cannot remove '{self.path}': {error.strerror}") from None
        return True

    def _present_text(self) -> str | None:
        try:
            present = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ManagerError(f"cannot read '{self.path}': {error.strerror}") from None
        if _OURS not in present.splitlines():
            raise ManagerError(
                f"'{self.path}' exists already, and is not a unit of dprobes", hint="move it away, or remove it"
            )
        return present


def unit_directory(environment: Mapping[str, str], *, of_user: bool) -> Path:
    """Return the directory for an administrator's or a user's units (systemd.unit(5), "Unit File Load Path")."""
    if not of_user:
        return _SYSTEM_DIRECTORY
    configuration = environment.get("XDG_CONFIG_HOME", "")
    return (Path(configuration) if configuration.startswith("/") else Path.home() / ".config") / "systemd" / "user"


def manager_command() -> Path:
    """Return the path of ``dprobes-manager`` that belongs to this Python; raise ``ManagerError`` if it is missing."""
    path = Path(sysconfig.get_path("scripts")) / "dprobes-manager"
    if not path.is_file():
        raise ManagerError(
            f"the command of the manager is not at '{path}'",
            hint="install dprobes with pip, pipx or uv: units start it",
        )
    return path


def units(directory: Path, command: Path, *, of_user: bool) -> tuple[InstalledUnit, ...]:
    """
    Return the units of the system, or ``of_user`` of a user, that start ``command``.

    Raise ``ManagerError`` if this installation has no unit files.
    """
    source = _source("user" if of_user else "system")
    quoted = "".join(_SPECIAL.get(character, character) for character in str(command))
    start = f'{_START}"{quoted}"' if any(c.isspace() for c in quoted) else _START + quoted
    return tuple(
        InstalledUnit(
            directory / name,
            (source / name).read_text(encoding="utf-8").replace(f"{_START}dprobes-manager", start),
        )
        for name in UNIT_NAMES
    )


def _source(kind: str) -> Path:
    checkout, wheel = Path(__file__).parents[3] / "packaging", Path(sys.prefix) / "lib"
    for root in (checkout, wheel):
        directory = root / "systemd" / kind
        if all((directory / name).is_file() for name in UNIT_NAMES):
            return directory
    raise ManagerError(
        f"the units are neither in '{checkout / 'systemd' / kind}' nor in '{wheel / 'systemd' / kind}'",
        hint="install dprobes again: its wheel has them",
    )
