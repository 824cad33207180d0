"""
Engines count the same at random instructions of real programs that do the same in each run.

Such a program has the same addresses, environment and random numbers each time. Others differ from themselves: perl
with hashes in another order takes other ways through malloc, at some of a hundred places, under any engine.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

from dprobes.target.elf.elf_file import ElfFile
from integration.ebpf.kernel import require_bpf
from integration.support import TIMEOUT
from support.instruction_places import accepted, random_places
from support.rounds import IS_TORTURE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.support import Result, Runner

PLACES = 3000 if IS_TORTURE else 500
SEEDS = range(8 if IS_TORTURE else 1)
ENGINES = ("ptrace", "inline", "ebpf")

BASH = """
f() { local i=$1; while ((i > 0)); do a[i]=$((i * i)); ((i--)); done; }
declare -a a; f 30
for x in "${a[@]}"; do case $x in *5) y+=$x;; *) z=${x/4/five};; esac; done; printf '%s\\n' "$y" "$z"
"""
PERL = 'my %h; $h{$_} = $_ * 2 for 1 .. 200; print join(",", map { $h{$_} } sort keys %h), "\\n"'
COMMANDS = {
    "bash": ("bash", "-c", BASH),
    "perl": ("perl", "-e", PERL),
}
ALIKE = ("setarch", "-R", "env", "-i", "PERL_HASH_SEED=0")
"""What makes runs of a command alike: the same addresses, environment and order of hashes."""


def mapped_library(program: Path) -> Path:
    """Return the C library that a program is linked with."""
    assert "libc.so.6" in ElfFile.open(program).needed
    with Path("/proc/self/maps").open() as maps:
        return next(Path(line.split()[-1]) for line in maps if line.rstrip().endswith("libc.so.6"))


def resolvers(module: Path) -> Iterator[int]:
    """Iterate over the offsets of what the dynamic linker calls before it announces a library: only eBPF sees that."""
    elf = ElfFile.open(module)
    listed = subprocess.run(["readelf", "-sW", module], capture_output=True, text=True, timeout=TIMEOUT, check=True)
    for address, size in re.findall(r"^ *\d+: ([0-9a-f]+) +(\d+) IFUNC ", listed.stdout, re.MULTILINE):
        start = elf.file_offset(int(address, 16))
        assert start is not None
        yield from range(start, start + int(size))


@pytest.mark.alone
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("where", ["program", "C library"])
@pytest.mark.parametrize("name", COMMANDS)
def test_engines_count_the_same(name: str, where: str, seed: int, run: Runner) -> None:
    require_bpf()
    found = shutil.which(name)
    assert found is not None, f"Debian's base system has {name}"
    program = Path(found).resolve()
    module = program if where == "program" else mapped_library(program)
    places = random_places(module, PLACES, Random(f"{name} {seed}"))
    outputs, counted = set(), []
    for engine in ENGINES:

        def probed(source: str, engine: str = engine) -> Result:
            return run(source, ["--", *ALIKE, str(program), *COMMANDS[name][1:]], ["--engine", engine])

        taken, result = accepted(module, places, "", probed)
        outputs.add(result.stdout)
        counted.append({place.offset: result.counts[n].hits for n, place in enumerate(taken) if n in result.counts})
    common = set.intersection(*map(set, counted)) - set(resolvers(module))
    hits = [{offset: count for offset, count in counts.items() if offset in common and count} for counts in counted]
    assert hits[0] == hits[1] == hits[2]
    assert len(hits[0]) >= 10
    assert len(outputs) == 1
