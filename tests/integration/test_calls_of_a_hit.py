"""
A hit costs the tracer a bounded number of Python calls, and each of them some tenths of a microsecond.

Who reads what happens at a hit goes from file to file as the calls do: how often one is in another file than the last
one is bounded as well. A hit whose instruction is executed in its slot has two halves.
"""

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
    tally = Counter()
    state = [0, 0, False, ""]  # how deep in one of the roots, the calls so far, whether it is a hit, and the last file
    changes = [0]

    def count(frame, event, _):
        if event == "call" and not state[0] and frame.f_code.co_qualname == ROOTS[1]:
            state[1] = changes[0] = 0  # an earlier look has found that the thread still runs
        if event == "call" and (state[0] or frame.f_code.co_qualname in ROOTS):
            state[0] += 1
            state[1] += 1
            state[2] = state[2] or frame.f_code.co_name == "_on_hit"
            changes[0] += frame.f_code.co_filename != state[3]
            state[3] = frame.f_code.co_filename
        elif event == "return" and state[0]:
            state[0] -= 1
            if not state[0] and frame.f_code.co_qualname == ROOTS[0]:
                if state[2]:
                    tally[state[1], changes[0]] += 1
                state[1:3] = 0, False
                changes[0] = 0

    def report():
        sys.setprofile(None)
        with open(REPORT, "w") as file:
            json.dump(tally.most_common(), file)

    atexit.register(report)
    sys.setprofile(count)
"""

HITS = 200


@pytest.mark.parametrize(
    ("site", "executed", "most_calls", "most_changes"),
    [("push", "emulated", 41, 20), ("move", "emulated", 38, 18), ("locked", "in a page", 48, 27)],
    ids=["emulated push", "emulated move", "executed in a slot"],
)
def test_a_hit_with_a_record_takes_no_more_calls_and_files(
    build: Builder,
    run: Runner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    site: str,
    executed: str,
    most_calls: int,
    most_changes: int,
) -> None:
    report = tmp_path / "report.json"
    (tmp_path / "sitecustomize.py").write_text(COUNTING.replace("REPORT", repr(str(report))))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    source = f"name = insns\noffset = site_{site}\nminor = 1\npush r, arg0\nlog 1\nexit\n"
    result = run.command(source, build("insns.c"), HITS)
    assert (result.counts[1].hits, result.counts[1].executed) == (HITS, executed)
    ((calls, files), stops), *_ = json.loads(report.read_text())
    assert stops >= HITS // 2
    assert calls <= most_calls
    assert files <= most_changes
