"""What records come from, to JSON and back."""

from __future__ import annotations

import json

import pytest

from dprobes.record.record_origin import RecordSource

FILES = {"templates.lst": b"7 s.fmt", "s.fmt": b"\xff"}
SOURCE = RecordSource(3, "service", "/usr/bin/service", 7, ("12ab",), FILES, ("/usr/bin/service",))


def test_it_is_the_same_after_json() -> None:
    details = json.loads(json.dumps(SOURCE.details()))
    assert RecordSource.from_details(3, "service", 7, details) == SOURCE


def test_what_older_files_lack_has_a_default() -> None:
    assert RecordSource.from_details(1, "a", 0, {}) == RecordSource(1, "a", "a")


@pytest.mark.parametrize("paths", ["/bin/a", [1], {"a": 1}])
def test_wrong_paths_are_refused(paths: object) -> None:
    with pytest.raises(ValueError, match="paths are not a list of strings"):
        RecordSource.from_details(1, "a", 0, {"paths": paths})


@pytest.mark.parametrize(
    ("template", "shows"),
    [
        ('fmt = "%d %s %p %lx"', False),
        ('fmt = "%a"', True),
        ('fmt = "at=%*a"', True),
        ('fmt = "%*k"', True),
        ('fmt = "100%% a"', False),
        ('fmt = "%-20la"', True),
        ('fmt = "%(arg0)qd and %{name}"', False),
        ('fmt = "%(address_of_the_caller)*qa"', True),
        ('fmt = "%(calls)*k"', True),
        ("", False),
    ],
)
def test_what_prints_names_of_addresses_is_known(template: str, shows: bool) -> None:
    text = f"minor = 1\n{template}\n"
    assert RecordSource(1, "app", templates={"a.fmt": text.encode()}).may_show_addresses == shows
    assert RecordSource(1, "app", derived={8: text}).may_show_addresses == shows
