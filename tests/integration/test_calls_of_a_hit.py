"""A hit costs the tracer a bounded number of Python calls, and each of them some tenths of a microsecond."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner

COUNTING = """
import atexit, json, sys
from collections import Counter

if any("ptrace.tracer" in argument for argument in sys.orig_argv):
    ROOTS = ("Tracer._handle", "Stopper._secure")
    tally, state = Counter(), [0, 0, False]  # how deep in one of the roots, the calls so far, and whether it is a hit

    def count(frame, event, _):
        if event == "call" and (state[0] or frame.f_code.co_qualname in ROOTS):
            state[0] += 1
            state[1] += 1
            state[2] = state[2] or frame.f_code.co_name == "_on_hit"
        elif event == "return" and state[0]:
            state[0] -= 1
            if not state[0] and frame.f_code.co_qualname == ROOTS[0]:
                if state[2]:
                    tally[state[1]] += 1
                state[1:] = 0, False

    def report():
        sys.setprofile(None)
        with open(REPORT, "w") as file:
            json.dump(tally.most_common(), file)

    atexit.register(report)
    sys.setprofile(count)
"""

HITS = 200


@pytest.mark.parametrize(
    ("site", "executed", "most"),
    [("push", "emulated", 46), ("move", "emulated", 43), ("locked", "in a page", 50)],
    ids=["emulated push", "emulated move", "executed in a slot"],
)
def test_a_hit_with_a_record_takes_no_more_calls(
    build: Builder,
    run: Runner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    site: str,
    executed: str,
    most: int,
) -> None:
    report = tmp_path / "report.json"
    (tmp_path / "sitecustomize.py").write_text(COUNTING.replace("REPORT", repr(str(report))))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    source = f"name = insns\noffset = site_{site}\nminor = 1\npush r, arg0\nlog 1\nexit\n"
    result = run.command(source, build("insns.c"), HITS)
    assert (result.counts[1].hits, result.counts[1].executed) == (HITS, executed)
    (calls, stops), *_ = json.loads(report.read_text())
    assert stops >= HITS // 2
    assert calls <= most
