"""The case files as such: their format, and what a reader may rely on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.case_format import Case, CaseError, encode_items, parse_case

if TYPE_CHECKING:
    from pathlib import Path


def _case(tmp_path: Path, text: str) -> Case:
    path = tmp_path / "x.case"
    path.write_text(text)
    return parse_case(path, "x")


GOOD = "-- title\nA case is read.\n-- source\nexit\n-- log\n"


def test_there_are_many_cases(all_cases: list[Case]) -> None:
    assert len(all_cases) >= 220


def test_each_case_states_another_fact(all_cases: list[Case]) -> None:
    titles = [case.title for case in all_cases]
    assert sorted(set(titles)) == sorted(titles)


def test_a_case_runs_for_both_words_unless_it_says_otherwise(tmp_path: Path) -> None:
    assert [t.architecture for t in _case(tmp_path, GOOD).targets] == ["i386", "x86_64"]
    assert [t.architecture for t in _case(tmp_path, GOOD + "-- word 4\n").targets] == ["i386"]
    assert [t.architecture for t in _case(tmp_path, GOOD + "-- byte order big\n").targets] == ["s390", "s390x"]
    assert [t.architecture for t in _case(tmp_path, GOOD + "-- architecture ppc\n").targets] == ["ppc"]


def test_headers_and_source_become_a_program(tmp_path: Path) -> None:
    case = _case(tmp_path, GOOD + "-- file header\nvars = 1\n-- probe header\nminor = 2\n")
    assert case.program == "name = case\nvars = 1\noffset = 0\nminor = 2\nexit\n"


def test_items_are_bytes_texts_and_numbers_in_the_targets_order(tmp_path: Path) -> None:
    case = _case(
        tmp_path, GOOD.replace("-- log\n", '-- byte order big\n-- log\n41 x2 "BC\\x00" w:-1 h:1 d:2 q:3 o:p // x')
    )
    expected = b"AABC\0" + b"\xff" * 4 + bytes([0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 9])
    items = case.items("log", case.targets[0])
    assert items is not None
    assert encode_items(items, case.targets[0], {"p": 9}) == expected


def test_a_section_may_differ_by_word(tmp_path: Path) -> None:
    case = _case(tmp_path, GOOD + "-- stack 4\n1\n-- stack 8\n2 // two\n")
    assert [case.numbers("stack", target) for target in case.targets] == [[1], [2]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": no '-- title' that is a sentence"),
        ("-- title\nno full stop\n-- source\nexit\n-- log\n", ": no '-- title' that is a sentence"),
        ("text\n" + GOOD, ":1: text before the first section"),
        (GOOD + "-- colour\n", ":6: unknown section 'colour'"),
        (GOOD + "-- log\n", ":6: a second '-- log'"),
        (GOOD + "-- program\nname = a\n", ": needs one of '-- source', '-- program' and '-- c source'"),
        ("-- title\nA.\n-- log\n", ": needs one of '-- source', '-- program' and '-- c source'"),
        ("-- title\nA.\n-- program\nx\n-- log\n-- file header\ny\n", ": a whole program has headers of its own"),
        ("-- title\nA.\n-- source\nexit\n", ": expects nothing"),
        (GOOD + "-- word 5\n", ":6: '-- word' is one of 4, 8, both, not '5'"),
        (GOOD + "-- architecture vax\n", ":6: unknown architecture 'vax'"),
        (GOOD + "-- architecture ppc\n-- word 4\n", ": '-- architecture' says word and byte order already"),
        (GOOD + "4x\n", ":5: cannot read '4x'"),
        (GOOD + "x3\n", ":5: 'x3' repeats nothing"),
        (GOOD + "w:z\n", ":5: 'z' is not a number"),
        (GOOD + "-- stack\n1 two\n", ":6: 'two' is not a number"),
        (GOOD + "-- context\npid 5\n", ":6: expected 'words = values', found 'pid 5'"),
    ],
)
def test_a_malformed_case_is_an_error_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CaseError) as caught:
        _case(tmp_path, text)
    assert str(caught.value) == f"{tmp_path}/x.case{message}"
