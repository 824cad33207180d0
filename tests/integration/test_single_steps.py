"""
Hits are the arrivals that a single-stepper of our own counts, at random instructions of real programs.

``programs/stepper.c`` shares nothing with DProbes: no breakpoints, and each instruction of the command is seen. Both
run it with the same environment and without randomised addresses. Where the dynamic linker calls into a library before
it announces it, no probepoint can be hit (docs/reference/engine-ptrace.md): there hits are between the arrivals since
the program's entry and all of them; everywhere else both are the same number.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import pytest

from integration.ebpf.kernel import require_bpf
from integration.support import PATIENCE, TIMEOUT, environment
from support.instruction_places import accepted, random_places

if TYPE_CHECKING:
    from collections.abc import Sequence

    from integration.support import Builder, Result, Runner
    from support.instruction_places import Place

STEPPING_TIMEOUT = 280 * PATIENCE
"""A step takes 2 us on a processor, 50 on some virtual ones; these commands have some hundred thousand."""

SEED = int(os.environ.get("DPROBES_TORTURE_SEED", "1"))
PLACES = 1500  # of each file
ADDR_NO_RANDOMIZE = 0x0040000

COMMANDS = {
    "sort": ("sort", "--parallel=1", "-r", "/etc/passwd"),
    "perl": ("perl", "-e", "my %h = map { $_ => $_ * 7 } 1 .. 9; print join(q(,), map { $h{$_} } sort keys %h)"),
    "sqlite3": ("sqlite3", ":memory:", "select upper(lower('Ab')), sum(value) from json_each('[1,2.5,3]')"),
    "standard": ("standard", "1"),
}


class Stepped(NamedTuple):
    """Hold a command, its files with the places in each, and how often the stepper saw it arrive at each."""

    command: list[str]
    places: dict[Path, list[Place]]
    arrivals: dict[tuple[Path, Place], tuple[int, int]]
    status: int
    output: str


def fix_addresses() -> None:
    ctypes.CDLL(None).personality(ADDR_NO_RANDOMIZE)


def files_of(program: str) -> list[Path]:
    """Return a program and its libraries, but the dynamic linker, whose own start nobody can see."""
    text = subprocess.run(["ldd", program], check=True, capture_output=True, text=True, timeout=TIMEOUT).stdout
    return [Path(program).resolve(), *(Path(found).resolve() for found in re.findall(r"=> (/\S+)", text))]


def step(stepper: Path, command: Sequence[str], seed: int) -> Stepped:
    places = {path: random_places(path, PLACES, Random(f"{seed} {path.name}")) for path in files_of(command[0])}
    asked = "".join(f"{n} {place.offset:x}\n" for n, found in enumerate(places.values()) for place in found)
    done = subprocess.run(
        [stepper, *places, "--", *command],
        input=asked, capture_output=True, text=True, check=False, timeout=STEPPING_TIMEOUT, env=environment(),
    )  # fmt: skip
    rows = [tuple(map(int, line.split())) for line in done.stderr.splitlines()]
    keys = [(path, place) for path, found in places.items() for place in found]
    assert len(rows) == len(keys), done.stderr[-500:]
    arrivals = {key: (row[0], row[1]) for key, row in zip(keys, rows, strict=True)}
    return Stepped(list(command), places, arrivals, done.returncode, done.stdout)


def hits_of(stepped: Stepped, path: Path, engine: str, run: Runner) -> dict[Place, int]:
    """Return how often the places of a file that an engine takes were hit."""

    def probed(source: str) -> Result:
        return run(
            source, ["--exit-status", "--", *stepped.command], ["--engine", engine],
            stdin=subprocess.DEVNULL, preexec_fn=fix_addresses,
        )  # fmt: skip

    taken, result = accepted(path, stepped.places[path], "", probed)
    assert (result.status, result.stdout) == (stepped.status, stepped.output), result.stderr[-2000:]
    return {place: result.counts[n].hits if n in result.counts else 0 for n, place in enumerate(taken)}


@pytest.mark.torture
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", COMMANDS)
def test_hits_are_the_arrivals_of_a_single_stepper(
    build: Builder, run: Runner, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_bpf()
    for variable, value in (("LC_ALL", "C"), ("PERL_HASH_SEED", "0")):
        monkeypatch.setenv(variable, value)
    stepper, (program, *arguments) = build("stepper.c"), COMMANDS[name]
    found = build("standard.cc", "-lstdc++") if program == "standard" else shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed")
    stepped = step(stepper, [str(Path(found).resolve()), *arguments], SEED)
    for engine in ("ptrace", "ebpf"):
        placed = hits = exact = 0
        for path in stepped.places:
            counted = hits_of(stepped, path, engine, run)
            bounds = {place: stepped.arrivals[path, place] for place in counted}
            wrong = {place: (n, bounds[place]) for place, n in counted.items() if not is_right(n, *bounds[place])}
            assert wrong == {}, f"{engine}, seed {SEED}, {path}"
            placed, hits = placed + len(counted), hits + sum(counted.values())
            exact += sum(all_ == late for all_, late in bounds.values())
        print(f"{name}, {engine}: {placed} probepoints, {hits} hits, all as stepped; {exact} not reached by the linker")
        assert hits >= 500


def is_right(hits: int, arrivals: int, since_entry: int) -> bool:
    """Return whether hits are the arrivals, less what came before the library was announced."""
    return since_entry <= hits <= arrivals
