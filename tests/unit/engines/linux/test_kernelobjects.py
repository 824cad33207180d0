from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.linux import kernelobjects
from dprobes.engines.linux.kernelobjects import HeadStartError, Notes, Request, Standing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATH = 16
SOME, OTHER = Request(0, b"attributes"), Request(0, b"attributeS")


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    kernelobjects.stand(None)
    kernelobjects.note_into(None)


def descriptor() -> int:
    return os.open(os.devnull, os.O_RDONLY)


def standing(*objects: tuple[Request, int]) -> Standing:
    made = Standing((1, 2), frozenset({3}))
    for each in objects:
        made.add(*each)
    kernelobjects.stand(made)
    return made


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def issued(monkeypatch: pytest.MonkeyPatch, result: int | OSError) -> list[Request]:
    asked: list[Request] = []

    def issue(request: Request) -> int:
        asked.append(request)
        if isinstance(result, OSError):
            raise result
        return result

    monkeypatch.setattr(kernelobjects, "issue", issue)
    return asked


def test_what_stands_is_given_in_order_and_what_comes_then_is_asked_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = issued(monkeypatch, 7)
    made = standing((SOME, 100), (OTHER, 101))
    assert [kernelobjects.made(Request(0, each.attributes)) for each in (SOME, OTHER)] == [100, 101]
    assert made.is_used_up
    assert kernelobjects.made(SOME) == 7
    assert asked == [SOME]


@pytest.mark.parametrize("request_", [OTHER, Request(1, SOME.attributes), Request(0, SOME.attributes, {8: b"more"})])
def test_something_else_ends_the_head_start(request_: Request) -> None:
    made = standing((SOME, 100))
    with pytest.raises(HeadStartError):
        kernelobjects.made(request_)
    assert not made.is_used_up


def test_what_is_asked_for_aside_is_no_part_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = issued(monkeypatch, 7)
    standing((SOME, 100))
    assert kernelobjects.aside(lambda: kernelobjects.made(OTHER)) == 7
    assert kernelobjects.made(SOME) == 100
    assert asked == [OTHER]


def test_a_refusal_stands_as_well() -> None:
    standing((SOME, -errno.EACCES), (OTHER, 5))
    with pytest.raises(PermissionError, match="bpf 0: Permission denied"):
        kernelobjects.made(SOME)
    assert kernelobjects.made(OTHER) == 5


def test_giving_up_closes_what_nobody_has_taken() -> None:
    taken, left = descriptor(), descriptor()
    standing((SOME, taken), (OTHER, -errno.EACCES), (SOME, left))
    assert kernelobjects.made(SOME) == taken
    kernelobjects.give_up()
    assert is_open(taken)
    assert not is_open(left)
    assert kernelobjects.standing() is None
    os.close(taken)


def test_a_file_may_be_reached_by_another_path(tmp_path: Path) -> None:
    place, alias, other = tmp_path / "file", tmp_path / "alias", tmp_path / "other"
    place.touch()
    other.touch()
    alias.symlink_to(place)
    one, same, another = (
        Request(28, b"", {PATH: os.fsencode(each) + b"\0", 24: b"offsets"}, path=PATH) for each in (place, alias, other)
    )
    assert one.is_same(same)
    assert not one.is_same(another)
    assert not one.is_same(Request(28, b"", {PATH: os.fsencode(alias) + b"\0", 24: b"Offsets"}, path=PATH))
    alias.unlink()
    assert not one.is_same(same)


def test_the_scope_is_that_of_the_same_process_only() -> None:
    made = standing()
    with pytest.raises(HeadStartError):
        made.planted(12)
    made.scope = 12, -1
    assert made.planted(12) == -1
    with pytest.raises(HeadStartError):
        made.planted(13)


def test_notes_have_what_was_asked_for_and_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes()
    kernelobjects.note_into(notes)
    issued(monkeypatch, 7)
    kernelobjects.made(SOME)
    kernelobjects.aside(lambda: kernelobjects.made(OTHER))
    issued(monkeypatch, OSError(errno.EPERM, "refused"))
    with pytest.raises(PermissionError):
        kernelobjects.made(OTHER)
    assert notes.steps == [(SOME, 7), (OTHER, -errno.EPERM)]


def test_who_takes_notes_is_told_once_before_uprobes_are_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes()
    seen: list[int] = []
    notes.before_arming = lambda: seen.append(len(notes.steps))
    kernelobjects.note_into(notes)
    issued(monkeypatch, 7)
    for request in (SOME, Request(28, b"", in_proxy=True), Request(28, b"", in_proxy=True)):
        kernelobjects.made(request)
    assert seen == [1]
