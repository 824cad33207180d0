"""Flame graphs: what is in the page, and that no name can do harm in it."""

from __future__ import annotations

import json
import re
from typing import Any

from dprobes.sinks.stacks.profile_formats import flame_graph
from dprobes.sinks.stacks.stack_profile import StackProfile


def data_of(page: str) -> Any:
    match = re.search(r"^const data = (.*);$", page, re.MULTILINE)
    assert match is not None
    return json.loads(match[1])


def test_the_rows_are_the_frames_with_what_they_weigh() -> None:
    page = flame_graph(StackProfile({("p", "main", "b"): 3, ("p", "main", "a"): 2, ("p", "main"): 5}, "bytes", "mine"))
    data = data_of(page)
    assert (data["title"], data["unit"], data["baseline"]) == ("mine", "bytes", None)
    assert data["rows"] == [[0, "all", 10, 0], [1, "p", 10, 0], [2, "main", 10, 0], [3, "a", 2, 0], [3, "b", 3, 0]]


def test_a_baseline_adds_what_was_there_before() -> None:
    now, before = StackProfile({("p", "a"): 3}), StackProfile({("p", "b"): 4}, title="old.folded")
    data = data_of(flame_graph(now, before))
    assert data["baseline"] == "old.folded"
    assert data["rows"] == [[0, "all", 3, 4], [1, "p", 3, 4], [2, "a", 3, 0], [2, "b", 0, 4]]


def test_frames_too_small_to_be_seen_are_left_out() -> None:
    data = data_of(flame_graph(StackProfile({("big",): 10_000, ("small",): 1})))
    assert [row[1] for row in data["rows"]] == ["all", "big"]


def test_no_name_can_end_the_script_or_the_title() -> None:
    name = "</script><script>alert(1)</script>\u2028"
    page = flame_graph(StackProfile({(name,): 1}, title="<b>"))
    assert page.count("</script>") == 1
    assert "<title>&lt;b&gt;</title>" in page
    assert data_of(page)["rows"][1][1] == name


def test_stacks_may_be_deep() -> None:
    stack = tuple(f"f{n}" for n in range(5000))
    assert data_of(flame_graph(StackProfile({stack: 1})))["rows"][-1] == [5000, "f4999", 1, 0]


def test_the_page_needs_nothing_from_elsewhere() -> None:
    assert re.search(r"(src|href)=|https?://|import ", flame_graph(StackProfile({("a",): 1}))) is None
