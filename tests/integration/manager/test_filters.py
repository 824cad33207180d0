"""Filters of programs that the manager has inserted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from integration.support import await_true

if TYPE_CHECKING:
    from integration.manager.sandbox import Sandbox, Service

SOURCE = 'name = "{library}"\nmajor = 5\noffset = write_file\nminor = 1\n    push r, arg0\n    log 1\n'
FILTER = 'comm == "service" and arg0 >= 2'


def test_hits_that_a_filter_does_not_hold_for_make_no_record(sandbox: Sandbox, target: Service, engine: str) -> None:
    source = sandbox.write("calls.rpn", SOURCE.format(library=target.library))
    sandbox(f"dprobes insert {source} -p {target.pid} --engine {engine} --as calls --filter '{FILTER}'")
    target.call("write_file", 5)
    await_true(lambda: sandbox.counts("calls") == {1: 5}, "the hits")
    (program,) = sandbox.json("dprobes query --json")["programs"]
    assert program["filters"] == [FILTER]
    shown = sandbox("dprobes query")
    assert f"hits that --filter '{FILTER}' refuses make no record" in shown
    code = sandbox("dprobes query --extended")
    assert 'match comm, "service"' in code
    records = sandbox("dprobes log --format json").splitlines()
    assert program["probes"][0]["counts"]["records"] == len(records) < 5


def test_a_wrong_filter_is_refused_with_its_place(sandbox: Sandbox, target: Service) -> None:
    source = sandbox.write("calls.rpn", SOURCE.format(library=target.library))
    done = sandbox.shell(f"dprobes insert {source} -p {target.pid} --filter 'arg0 == 1 and time > 5'")
    assert done.returncode == 2
    assert done.stderr == (
        "--filter:1:15: error: 'time' exists in records, but not at a hit: "
        "the time of a hit is read with the record\n"
        "    arg0 == 1 and time > 5\n"
        "                  ^~~~\n"
    )
