"""Answers that are kept with a module: worked out once for each question."""

from __future__ import annotations

from dprobes.resolve.knownanswers import KnownAnswers, answered


def test_an_answer_is_worked_out_once_for_equal_questions() -> None:
    known = KnownAnswers()
    worked: list[int] = []

    def work() -> str:
        worked.append(len(worked))
        return f"answer {len(worked)}"

    assert answered(known, ("size", frozenset({1, 2})), work) == "answer 1"
    assert answered(known, ("size", frozenset({2, 1})), work) == "answer 1"
    assert answered(known, ("size", frozenset({1})), work) == "answer 2"
    assert worked == [0, 1]
    assert len(known) == 2


def test_without_answers_that_are_kept_each_is_worked_out() -> None:
    answers = iter("ab")
    assert [answered(None, "question", lambda: next(answers)) for _ in range(2)] == ["a", "b"]


def test_what_was_added_is_found() -> None:
    known = KnownAnswers()
    assert known.find("question") is None
    known.add("question", 7)
    assert known.find("question") == 7
