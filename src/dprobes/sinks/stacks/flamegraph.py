"""Flame graphs: one HTML file that needs nothing else, to zoom, to search in, and to compare two profiles with."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.sinks.stacks.profile import tree_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.sinks.stacks.profile import FrameNode, StackProfile

__all__ = ["flame_graph"]

_PAGE = Path(__file__).with_name("flamegraph.html")
_LEAST = 1 / 4000
"""Frames with a smaller part of all are left out: they would be less than half a pixel wide."""


def flame_graph(profile: StackProfile, baseline: StackProfile | None = None) -> str:
    """Return the page of a profile; with a ``baseline``, frames are coloured by what they have gained or lost."""
    root = tree_of(profile, baseline)
    least = max(root.weight, root.before) * _LEAST
    data = {
        "title": profile.title,
        "unit": profile.unit,
        "baseline": None if baseline is None else baseline.title or "before",
        "rows": list(_rows(root, least)),
    }
    # No name can end the script, whatever is in it.
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
    page = _PAGE.read_text(encoding="utf-8")
    return page.replace("{{title}}", html.escape(profile.title or "Flame graph")).replace("{{data}}", text)


def _rows(root: FrameNode, least: float) -> Iterator[tuple[int, str, int, int]]:
    """Give depth, name, weight and weight before of each frame, a frame before its callees; stacks may be deep."""
    waiting = [(0, root)]
    while waiting:
        depth, node = waiting.pop()
        yield depth, node.name, node.weight, node.before
        callees = (each for each in node.sorted_callees() if max(each.weight, each.before) >= least)
        waiting += [(depth + 1, each) for each in reversed(list(callees))]
