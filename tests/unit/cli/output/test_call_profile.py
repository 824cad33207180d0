"""Profiles of calls: the calls between two profiles of one run."""

from __future__ import annotations

from dprobes.cli.output.call_profile import CallEdge, CallProfile, FunctionTimes, since


def test_the_calls_since_a_profile_are_those_that_it_lacks() -> None:
    before = CallProfile("m", (CallEdge("", "f", 2, 100, 60), CallEdge("f", "g", 2, 40, 40)), {"f": 10}, {"g": 1})
    after = CallProfile(
        "m",
        (CallEdge("", "f", 5, 400, 290), CallEdge("f", "g", 2, 40, 40), CallEdge("f", "h", 1, 70, 70)),
        {"f": 30},
        {"g": 1, "h": 1},
    )
    found = since(before, after)
    assert found.edges == (CallEdge("", "f", 3, 300, 230), CallEdge("f", "h", 1, 70, 70))
    assert found.functions() == [FunctionTimes("f", 3, 280, 230, 0), FunctionTimes("h", 1, 70, 70, 1)]
    assert since(after, after).edges == ()
