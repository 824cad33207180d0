"""Files in the user's cache directory: what counts, and what does not."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from dprobes.cache_files import cache_directory, cached_names, keep_newest, mark_used, read_cached, write_cached

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


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="root: files of others are made by root")
NOBODY = 65534


@as_root
@pytest.mark.parametrize("whose", ["file", "directory"])
def test_what_belongs_to_another_user_does_not_count(tmp_path: Path, whose: str) -> None:
    write_cached(str(tmp_path), "name", b"content")
    os.chown(tmp_path / "name" if whose == "file" else tmp_path, NOBODY, NOBODY)
    assert read_cached(str(tmp_path), "name") is None


def test_a_link_and_a_pipe_do_not_count(tmp_path: Path) -> None:
    write_cached(str(tmp_path), "name", b"content")
    (tmp_path / "link").symlink_to("name")
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert read_cached(str(tmp_path), "link") is None
    assert read_cached(str(tmp_path), "pipe") is None


def test_those_that_were_used_last_are_kept(tmp_path: Path) -> None:
    directory = str(tmp_path)
    for number, name in enumerate(("of-a", "of-b", "of-c", "other")):
        write_cached(directory, name, b"content")
        os.utime(tmp_path / name, (number, number))
    mark_used(directory, "of-a")
    keep_newest(directory, "of-", 2)
    assert sorted(cached_names(directory, "of-")) == ["of-a", "of-c"]
    assert sorted(cached_names(directory, "")) == ["of-a", "of-c", "other"]


def assert_is_left_alone(directory: str, files: Path) -> None:
    """Assert that nothing in a directory is read, written or removed by the name ``directory``."""
    before = {path.name: path.read_bytes() for path in files.iterdir()}
    assert before
    name = min(before)
    assert read_cached(directory, name) is None
    assert not write_cached(directory, name, b"of ours")
    assert not write_cached(f"{directory}/below", name, b"of ours")
    assert cached_names(directory, "") == []
    keep_newest(directory, "", 0)
    assert {path.name: path.read_bytes() for path in files.iterdir()} == before


@as_root
@pytest.mark.parametrize("place", ["home", "home/.cache", "home/.cache/dprobes"])
def test_nothing_is_done_below_a_directory_of_another_user(tmp_path: Path, place: str) -> None:
    """So it is when root's environment names the home of another user, who may put there what he wants."""
    directory = tmp_path / "home" / ".cache" / "dprobes"
    write_cached(str(directory), "name", b"content")
    assert read_cached(str(directory), "name") == b"content"
    os.chown(tmp_path / place, NOBODY, NOBODY)
    assert_is_left_alone(str(directory), directory)


@as_root
def test_a_link_that_another_user_has_made_leads_nowhere(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir(0o700)
    for number in range(8):
        (files / f"precious-{number}").write_bytes(b"content")
    tmp_path.chmod(0o1777)  # like /tmp
    (tmp_path / "dprobes").symlink_to(files)
    assert read_cached(str(tmp_path / "dprobes"), "precious-0") == b"content"
    os.chown(tmp_path / "dprobes", NOBODY, NOBODY, follow_symlinks=False)
    assert_is_left_alone(str(tmp_path / "dprobes"), files)


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_nothing_is_done_below_a_directory_that_others_can_write(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "above" / "dprobes"
    write_cached(str(directory), "name", b"content")
    (tmp_path / "above").chmod(mode)
    assert_is_left_alone(str(directory), directory)


def test_a_directory_where_each_name_is_its_owners_may_be_on_the_way(tmp_path: Path) -> None:
    (tmp_path / "above").mkdir()
    (tmp_path / "above").chmod(0o1777)
    directory = str(tmp_path / "above" / "dprobes")
    assert write_cached(directory, "name", b"content")
    assert read_cached(directory, "name") == b"content"
    (tmp_path / "above" / "dprobes").chmod(0o1777)
    assert read_cached(directory, "name") is None
    assert not write_cached(directory, "name", b"content")


def test_links_of_the_user_are_followed_as_long_as_they_lead_somewhere(tmp_path: Path) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True, mode=0o700)
    (tmp_path / "one").symlink_to("real")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    (tmp_path / "up").symlink_to("real/deep/..")
    (tmp_path / "loop").symlink_to("loop")
    assert write_cached(str(tmp_path / "two" / "deep"), "name", b"content")
    assert read_cached(str(tmp_path / "up" / "deep"), "name") == b"content"
    assert not write_cached(str(tmp_path / "loop"), "name", b"content")


IN_ANOTHER_FILE_SYSTEM = """
import os
from dprobes.cache_files import read_cached, write_cached
os.mkdir("{place}/dprobes", 0o700)
with open("{place}/dprobes/name", "wb") as file:
    file.write(b"content")
os.chmod("{place}/dprobes/name", 0o600)
print(write_cached("{place}/dprobes", "other", b"content"), read_cached("{place}/dprobes", "name"))
"""


@as_root
@pytest.mark.parametrize(
    ("kind", "options", "found"),
    [("ramfs", "nosuid", "False None"), ("ramfs", "suid", "True b'content'"), ("tmpfs", "nosuid", "True b'content'")],
)
def test_root_does_not_believe_who_owns_what_on_a_file_system_that_a_user_brings(
    tmp_path: Path, kind: str, options: str, found: str
) -> None:
    """Such a one is mounted without set-user-ID bits; one in memory has no files of before."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespace: not allowed, or the root directory is not a mount point")
    code = IN_ANOTHER_FILE_SYSTEM.format(place=tmp_path)
    script = f'mount -t {kind} -o mode=755,{options} none "$0" && exec "$1" -c "$2"'
    command = ["unshare", "--mount", "sh", "-c", script, str(tmp_path), sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{found}\n", "")
