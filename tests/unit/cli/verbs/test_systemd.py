"""The verb ``systemd``: what is written, and what systemd is told."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from dprobes.cli.main import run
from dprobes.cli.verbs import systemd

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for each thing that systemd was told, on a machine that runs it, for a user."""
    lines, booted = tmp_path / "told", tmp_path / "booted"
    booted.mkdir()
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$*" >> {lines}\n[ ! -e {tmp_path}/fails ] || {{ echo no bus >&2; exit 1; }}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(systemd, "_BOOTED", booted)
    return lines


def test_a_user_s_manager_is_installed_and_removed(
    told: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "systemd/user"
    assert run(["systemd", "install", "--user"]) == 0
    assert told.read_text() == "--user daemon-reload\n--user enable --now dprobes.socket\n"
    assert capsys.readouterr().out == (
        f"wrote {directory}/dprobes.service\nwrote {directory}/dprobes.socket\n"
        "systemd listens for 'dprobes insert' (dprobes.socket)\n"
    )
    told.unlink()
    assert run(["systemd", "remove", "--user"]) == 0
    assert told.read_text() == "--user disable --now dprobes.socket dprobes.service\n--user daemon-reload\n"
    assert list(directory.iterdir()) == []


def test_what_systemd_does_not_take_is_an_error(told: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fails").touch()
    assert run(["systemd", "install", "--user"]) == 1
    assert "dprobes: error: 'systemctl --user daemon-reload' failed: no bus\n" in capsys.readouterr().err
    assert told.read_text() == "--user daemon-reload\n"


def test_a_machine_without_systemd_gets_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(systemd, "_BOOTED", tmp_path / "not there")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert run(["systemd", "install", "--user"]) == 0
    assert capsys.readouterr().err == "dprobes: note: this system does not run systemd, which was not notified\n"
    assert (tmp_path / "systemd/user/dprobes.socket").is_file()


def test_units_of_the_system_are_root_s(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert run(["systemd", "install"]) == 1
    assert capsys.readouterr().err == (
        "dprobes: error: only root may change the system's units\nhint: use sudo, or --user for a manager of your own\n"
    )
