"""Files in the user's cache directory: what counts, and what does not."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from dprobes.cachefiles import cache_directory, read_cached, write_cached

if TYPE_CHECKING:
    from pathlib import Path


def test_the_directory_is_that_of_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_directory() == "/somewhere/dprobes"
    monkeypatch.setenv("HOME", "/home/user")
    for none in ("", "relative/path"):  # which the specification says to ignore
        monkeypatch.setenv("XDG_CACHE_HOME", none)
        assert cache_directory() == "/home/user/.cache/dprobes"


def test_what_was_written_is_read_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    assert write_cached(str(directory), "name", b"first")
    assert write_cached(str(directory), "name", b"second")
    assert read_cached(str(directory), "name") == b"second"
    assert [path.name for path in directory.iterdir()] == ["name"]
    assert (directory / "name").stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700


def test_what_cannot_be_written_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not write_cached(str(tmp_path / "file"), "name", b"content")
    (tmp_path / "name").mkdir()
    assert not write_cached(str(tmp_path), "name", b"content")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "name"]


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    assert read_cached(str(tmp_path), "name") is None
    assert read_cached(str(tmp_path / "nowhere"), "name") is None
    assert read_cached(str(tmp_path), "na\0me") is None


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_write_does_not_count(tmp_path: Path, mode: int) -> None:
    write_cached(str(tmp_path), "name", b"content")
    (tmp_path / "name").chmod(mode)
    assert read_cached(str(tmp_path), "name") is None


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_file_in_a_directory_that_others_can_write_does_not_count(tmp_path: Path, mode: int) -> None:
    write_cached(str(tmp_path), "name", b"content")
    tmp_path.chmod(mode)
    assert read_cached(str(tmp_path), "name") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="root: files of others are made by root")
@pytest.mark.parametrize("whose", ["file", "directory"])
def test_what_belongs_to_another_user_does_not_count(tmp_path: Path, whose: str) -> None:
    write_cached(str(tmp_path), "name", b"content")
    os.chown(tmp_path / "name" if whose == "file" else tmp_path, 65534, 65534)
    assert read_cached(str(tmp_path), "name") is None


def test_a_link_and_a_pipe_do_not_count(tmp_path: Path) -> None:
    write_cached(str(tmp_path), "name", b"content")
    (tmp_path / "link").symlink_to("name")
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert read_cached(str(tmp_path), "link") is None
    assert read_cached(str(tmp_path), "pipe") is None
