"""The search for sets: names, groups, conflicts, and whom root trusts."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from dprobes.errors import DprobesError, SourceError, TargetError
from dprobes.sets import is_set_path, set_library, view_in
from dprobes.sets.set_library import (
    choose_set,
    is_view,
    listed_sets,
    load_set,
    query_of,
    registered_majors,
    set_directories,
)
from unit.sets.test_set_description import GOOD

OWN = Path(set_library.__file__).parent


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of the user's sets."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    directory = tmp_path / "dprobes" / "sets"
    directory.mkdir(parents=True, mode=0o755)
    return directory


def write(home: Path, name: str = "sample", text: str = GOOD) -> Path:
    directory = home / name
    directory.mkdir(mode=0o755)
    (directory / "set.toml").write_text(text)
    (directory / "files.dpc").write_text("")
    for path in (directory / "set.toml", directory / "files.dpc"):
        path.chmod(0o644)
    return directory


def test_no_major_code_is_registered_twice() -> None:
    counts = Counter(registered_majors().values())
    assert [major for major, count in counts.items() if count > 1] == []
    assert all(major % 16 == 0 and 256 <= major < 16384 for major in counts)


def test_every_set_of_the_package_is_valid_and_registered() -> None:
    own = [each for each in listed_sets() if each.directory.parent == OWN]
    assert {each.name for each in own} == {path.parent.name for path in OWN.glob("*/set.toml")}
    for each in own:
        assert not isinstance(each.content, DprobesError), each.content
        assert registered_majors()[each.name] == each.content.major


def test_no_set_of_the_package_has_the_name_of_an_example() -> None:
    from dprobes.cli.option_values import all_examples

    assert {each.name for each in all_examples()} & {each.name for each in listed_sets()} == set()


def test_the_searched_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set_directories({"XDG_CONFIG_HOME": "/c"}) == (OWN, Path("/c/dprobes/sets"), Path("/etc/dprobes/sets"))
    monkeypatch.setenv("HOME", "/home/me")
    assert set_directories({"XDG_CONFIG_HOME": "relative"})[1] == Path("/home/me/.config/dprobes/sets")


def test_a_word_names_a_set_and_groups(home: Path) -> None:
    directory = write(home)
    assert choose_set("sample") == (directory / "set.toml", ())
    assert choose_set("sample:") == (directory / "set.toml", ())
    assert choose_set("sample:io") == (directory / "set.toml", ("io",))
    assert choose_set(f"{directory}:io") == (directory / "set.toml", ("io",))
    assert choose_set("nothing") is None
    assert choose_set("nothing:io") is None
    assert choose_set("./nothing") is None
    assert choose_set("libc.so.6:malloc") is None


VIEWS = """
[[view]]
name = "sizes"
question = "which sizes are there?"
file = "files.dpc"

[[view]]
name = "largest"
question = "which are the largest?"
sql = "select max(flags) from sample_file_open"
"""


def test_a_word_names_a_view(home: Path) -> None:
    directory = write(home, text=GOOD + VIEWS)
    path = directory / "set.toml" / "sizes"
    assert choose_set("sample/sizes") == choose_set("sample/sizes:") == (path, ())
    assert choose_set(f"{directory}/sizes") == (path, ())
    assert (is_set_path(path), view_in(path), view_in(directory / "set.toml")) == (True, "sizes", None)
    assert choose_set("other/sizes") is None
    assert [is_view(word) for word in ("sample/sizes", "sample/other", f"{directory}/sizes", "sample")] == [
        True,
        False,
        False,
        False,
    ]
    assert query_of("sample/largest") == ("select max(flags) from sample_file_open", ("sample.file.open",))
    assert query_of("select 1/sizes") is None
    assert query_of("other/largest") is None


@pytest.mark.parametrize(
    ("word", "message", "hint"),
    [
        (
            "sample/size",
            "the set 'sample' has no view 'size', and there is no file 'sample/size'",
            "did you mean 'sizes'?",
        ),
        (
            "sample/x",
            "the set 'sample' has no view 'x', and there is no file 'sample/x'",
            "its views are: sizes, largest",
        ),
        ("sample/sizes:io", "a view has no groups: 'sample/sizes:io'", "write 'sample/sizes'"),
    ],
)
def test_wrong_words_for_views(home: Path, word: str, message: str, hint: str) -> None:
    write(home, text=GOOD + VIEWS)
    with pytest.raises(TargetError) as raised:
        choose_set(word)
    assert (raised.value.message, raised.value.hint) == (message, hint)


def test_a_program_is_no_query(home: Path) -> None:
    write(home, text=GOOD + VIEWS)
    with pytest.raises(TargetError) as raised:
        query_of("sample/sizes")
    assert (raised.value.message, raised.value.hint) == (
        "'sample/sizes' is a program, not a query",
        "use 'dprobes run sample/sizes'",
    )


def test_a_missing_file_of_a_view(home: Path) -> None:
    directory = write(home, text=GOOD + VIEWS.replace("files.dpc", "sizes.dpc"))
    with pytest.raises(SourceError, match=f"'{directory}' has no file 'sizes.dpc'"):
        load_set(directory / "set.toml")


def test_an_unknown_group(home: Path) -> None:
    write(home)
    with pytest.raises(TargetError) as raised:
        choose_set("sample:locks")
    assert (raised.value.message, raised.value.hint) == ("the set 'sample' has no group 'locks'", "its groups are: io")


def test_two_sets_of_one_name(home: Path) -> None:
    directory = write(home, "sqlite", GOOD.replace("sample", "sqlite"))
    with pytest.raises(TargetError) as raised:
        choose_set("sqlite")
    assert raised.value.message == f"there are two sets 'sqlite': '{OWN}/sqlite' and '{directory}'"
    assert raised.value.hint == "name one by its path, or rename one"


def test_a_registered_code_belongs_to_its_set(home: Path) -> None:
    directory = write(home, text=GOOD.replace("major = 200", "major = 4096"))
    with pytest.raises(SourceError) as raised:
        load_set(directory / "set.toml")
    assert raised.value.message == (
        f"{directory}/set.toml:3:1: error: the major code 4096 is registered for the set 'sqlite'\n"
        "    major = 4096\n    ^~~~~~~~~~~~\n"
        "hint: codes up to 255 are free for sets of your own"
    )


def test_a_missing_file(home: Path) -> None:
    directory = write(home)
    (directory / "files.dpc").unlink()
    with pytest.raises(SourceError, match=f"'{directory}' has no file 'files.dpc'"):
        load_set(directory / "set.toml")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it is about whom root trusts")
@pytest.mark.parametrize("changed", ["directory", "parent", "set.toml", "files.dpc", "extra"])
@pytest.mark.parametrize("how", ["owner", "mode"])
def test_root_reads_no_set_that_others_can_change(home: Path, changed: str, how: str) -> None:
    directory = write(home)
    path = {"directory": directory, "parent": home}.get(changed, directory / changed)
    if changed == "extra":
        path.write_text("")
    assert load_set(directory / "set.toml").name == "sample"
    if how == "owner":
        os.chown(path, 65534, 65534)
    else:
        path.chmod(0o777)
    with pytest.raises(TargetError) as raised:
        load_set(directory / "set.toml")
    where = f"{directory}/{changed}" if changed in ("set.toml", "files.dpc", "extra") else str(directory)
    assert raised.value.message == f"root reads no set that others can change: '{where}'"
    assert raised.value.hint == (
        "give the directory, its parents and its files to root, without write permission for others"
    )
    ours = [each for each in listed_sets() if each.name == "sample"]
    assert [isinstance(each.content, TargetError) for each in ours] == [True]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it is about whom root trusts")
def test_root_follows_no_link_out_of_a_set(home: Path, tmp_path: Path) -> None:
    directory = write(home)
    (directory / "files.dpc").unlink()
    (tmp_path / "elsewhere.dpc").write_text("")
    (directory / "files.dpc").symlink_to(tmp_path / "elsewhere.dpc")
    with pytest.raises(TargetError) as raised:
        load_set(directory / "set.toml")
    assert raised.value.message == (
        f"'{directory}/files.dpc' is not a regular file, and root reads no set with such files"
    )
    assert raised.value.hint == "move it out of the set's directory"
