"""Runs of instrumentation sets: the records with their promised names and fields."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from dprobes.errors import DprobesError
from dprobes.sets.set_library import listed_sets
from integration.support import DPROBES, TIMEOUT

if TYPE_CHECKING:
    from dprobes.sets.set_description import InstrumentationSet

ROOT = Path(__file__).parents[2]
SETS: dict[str, InstrumentationSet] = {
    each.name: each.content
    for each in listed_sets()
    if not isinstance(each.content, DprobesError) and each.directory.is_relative_to(ROOT)
}
ENVIRONMENT = {**os.environ, "LC_ALL": "C", "PYTHONUNBUFFERED": "1"}


class Record(NamedTuple):
    """A record of a set's probe, with its promised name and the nanoseconds of CLOCK_MONOTONIC."""

    time: int
    probe: str
    process: int
    thread: int
    fields: dict[str, Any]


class Run(NamedTuple):
    """The records of a run, and what its command printed."""

    records: list[Record]
    output: str

    def of(self, probe: str, process: int | None = None) -> list[dict[str, Any]]:
        """Return the fields of a probe's records, in their order."""
        return [each.fields for each in self.records if each.probe == probe and process in (None, each.process)]


def read(lines: str, found: InstrumentationSet) -> list[Record]:
    names = {(found.major, probe.minor): probe.name for probe in found.probes}
    records = [json.loads(line) for line in lines.splitlines()]
    assert all(names[each["major"], each["minor"]] == each["probe"] for each in records)
    return [Record(each["time"], each["probe"], each["pid"], each["tid"], each.get("fields", {})) for each in records]


def run(word: str, engine: str, *arguments: str, path: Path) -> Run:
    """Run a set by its name on a command; check that each record has the fields that the set promises."""
    found = SETS[word.partition(":")[0]]
    output = path / "records"
    done = subprocess.run(
        [*DPROBES, "run", word, "--engine", engine, "--format", "json", "-o", output, *arguments],
        capture_output=True, text=True, timeout=3 * TIMEOUT, check=False, env=ENVIRONMENT,
    )  # fmt: skip
    if done.returncode != 0 and "switches stacks" in done.stderr:
        pytest.skip(f"a process of this machine forbids it: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    records = read(output.read_text(), found)
    keep_promises(records, found)
    return Run(records, done.stdout)


def keep_promises(records: list[Record], found: InstrumentationSet) -> None:
    promised = {probe.name: [field.name for field in probe.fields] for probe in found.probes}
    for record in records:
        assert list(record.fields) == promised[record.probe]
