"""Units of systemd: their text, and which files are ours to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from dprobes.errors import ManagerError
from dprobes.manager.systemd_units import UNIT_NAMES, InstalledUnit, unit_directory, units

OURS = "[Unit]\nDocumentation=man:dprobes(8)\n"


def _service(directory: Path, command: str) -> str:
    made = {unit.path.name: unit for unit in units(directory, Path(command), of_user=False)}
    assert tuple(made) == UNIT_NAMES
    return made["dprobes.service"].text


def test_the_service_has_the_path_of_the_command(tmp_path: Path) -> None:
    assert "\nExecStart=/opt/dp/bin/dprobes-manager\n" in _service(tmp_path, "/opt/dp/bin/dprobes-manager")


def test_what_systemd_gives_a_meaning_is_escaped(tmp_path: Path) -> None:
    assert '\nExecStart="/a b/%%i/$$x/\\"q/m"\n' in _service(tmp_path, '/a b/%i/$x/"q/m')


def test_users_have_units_of_their_own(tmp_path: Path) -> None:
    of_user = {unit.path.name: unit.text for unit in units(tmp_path, Path("/bin/m"), of_user=True)}
    assert "ListenStream=%t/dprobes/manager.sock" in of_user["dprobes.socket"]


@pytest.mark.parametrize(
    ("environment", "of_user", "directory"),
    [
        ({"XDG_CONFIG_HOME": "/c"}, False, Path("/etc/systemd/system")),
        ({"XDG_CONFIG_HOME": "/c"}, True, Path("/c/systemd/user")),
        ({"XDG_CONFIG_HOME": "relative"}, True, Path.home() / ".config/systemd/user"),
        ({}, True, Path.home() / ".config/systemd/user"),
    ],
)
def test_the_directory_is_where_systemd_looks(environment: dict[str, str], of_user: bool, directory: Path) -> None:
    assert unit_directory(environment, of_user=of_user) == directory


def test_a_unit_is_written_once_and_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "new" / "dprobes.socket"
    assert InstalledUnit(path, OURS).write()
    assert not InstalledUnit(path, OURS).write()
    assert InstalledUnit(path, OURS + "[Socket]\n").write()
    assert path.read_text() == OURS + "[Socket]\n"
    assert InstalledUnit(path, OURS).remove()
    assert not InstalledUnit(path, OURS).remove()


def test_a_file_of_somebody_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "dprobes.socket"
    path.write_text("[Unit]\n")
    unit = InstalledUnit(path, OURS)
    for change in (unit.write, unit.remove):
        with pytest.raises(ManagerError, match="exists already, and is not a unit of dprobes"):
            change()
    assert path.read_text() == "[Unit]\n"


def test_what_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "dprobes.socket"
    with pytest.raises(ManagerError) as raised:
        InstalledUnit(path, OURS).write()
    assert raised.value.message == f"cannot read '{path}': Not a directory"
