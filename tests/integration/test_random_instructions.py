"""
Probepoints at random instructions of real programs and libraries change neither output nor status.

Each round chooses some hundred instructions of one file, in whatever functions its unwind table knows, and runs a
workload with and without probepoints there. A failure names its seed; ``make torture`` goes on with new seeds.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import pytest

from integration.ebpf.kernel import require_bpf
from integration.support import TIMEOUT
from support.instruction_places import accepted, random_places

if TYPE_CHECKING:
    from integration.support import Builder, Result, Runner
    from support.instruction_places import Place

LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")
TORTURE_SECONDS = float(os.environ.get("DPROBES_TORTURE_SECONDS", "600")) / 10
"""What one workload gets with one engine: there are twelve of these."""

RUN_TIMEOUT = 180
COUNT = 2000
STANDARD = "{directory}/standard"
LIMIT = "maxhits = 200;"

_TEXT = "for i in 1 2 3; do for w in delta alpha charlie bravo; do echo $w $i $((i * i * 7919)); done; done"
_SQL = (
    "create table t(a integer primary key, b text, c real);"
    "with recursive n(i) as (select 1 union all select i + 1 from n where i < 300)"
    " insert into t select i, 'row ' || (i * 7919 % 1003), i / 3.0 from n;"
    "create index by_b on t(b); select count(*), min(b), max(b), round(sum(c), 3),"
    " group_concat(a) from t where b > 'row 3';"
    "select date(86400 * a, 'unixepoch'), printf('%08.3f', c),"
    " json_object('b', b) from t order by b desc limit 30;"
    "update t set b = upper(b) where a % 3; delete from t where a % 5 = 0; pragma integrity_check; vacuum;"
    "select hex(b), quote(c) from t limit 20; select nothing from nowhere;"
)
_PYTHON = (
    "import json, re, collections, hashlib, struct, zlib, decimal, itertools\n"
    "d = {str(i): [i, i / 7, {'x': i ** 20}] for i in range(60)}\n"
    "t = json.dumps(d, sort_keys=True); print(hashlib.sha256(t.encode()).hexdigest(), json.loads(t) == d)\n"
    "print(collections.Counter(re.findall(r'[0-9]+', t)).most_common(5), zlib.crc32(t.encode()))\n"
    "print(decimal.Decimal(2).sqrt(), struct.pack('<dfq', 1.5, 2.5, -3), sorted(d, reverse=True)[:5])\n"
    "print(sum(a * b for a, b in itertools.combinations(range(40), 2)), f'{3.14159:>12.4e}', 'ä'.encode())\n"
    "try:\n    [].pop()\nexcept IndexError as e:\n    print(repr(e))\n"
    "raise SystemExit(7)\n"
)
_PERL = (
    "my %h; my @w = map { chr(97 + $_ % 26) x ($_ % 5 + 1) } 1 .. 200; $h{$_}++ for @w;"
    "print join(',', map { qq($_=$h{$_}) } sort keys %h), qq(\\n);"
    "my $t = join ' ', @w; my $n = () = $t =~ /(\\w)\\1/g;"
    "printf qq(%d %.5f %s\\n), $n, atan2(1, 1) * 4, scalar reverse substr($t, 5, 30); $t =~ s/a+/<$&>/g; print $t;"
    "print unpack('H*', pack('N n w', 1e9, 77, 300)), sprintf('%b %o %e', 77, 77, 77), qq(\\n);"
    "eval { die {code => 5} }; exit $@->{code}"
)
_OPENSSL = (
    "cd {directory}; for d in md5 sha1 sha512 sha3-256 blake2b512 ripemd160; do openssl dgst -$d data; done;"
    "for c in aes-256-cbc aes-128-gcm camellia-256-cbc chacha20 aria-128-ctr des-ede3-cbc; do"
    " openssl enc -$c -K 00112233445566778899 -iv 0011 -in data 2>/dev/null | openssl dgst -sha256; done;"
    "openssl dgst -sha256 -sign key data | openssl dgst -md5; openssl prime 1000003; openssl rsa -in key -noout -check"
)


class Workload(NamedTuple):
    """Hold the file that is probed, and a command of which all is to be seen in its output and status."""

    name: str
    file: str
    command: tuple[str, ...]

    @property
    def path(self) -> Path:
        path = Path(self.file)
        program = self.command[0]
        if not path.exists() or (program != STANDARD and shutil.which(program) is None):
            pytest.skip(f"{self.file} or {program} is not here")
        return path.resolve()

    def line(self, directory: Path) -> list[str]:
        """Return a command whose output has both streams; nothing in its environment differs from run to run."""
        words = [word.replace("{directory}", str(directory)) for word in self.command]
        fixed = ["env", "-i", "PATH=/usr/bin:/bin", "LC_ALL=C", "PYTHONHASHSEED=0", "PERL_HASH_SEED=0"]
        return [*fixed, "sh", "-c", '"$@" 2>&1', "sh", *words]


WORKLOADS = (
    Workload(
        "libc", f"{LIBRARIES}/libc.so.6", ("bash", "-c", f"{_TEXT} | sort -k2,2n -k1,1 | tee /dev/stderr | md5sum")
    ),
    Workload("libcrypto", f"{LIBRARIES}/libcrypto.so.3", ("bash", "-c", _OPENSSL)),
    Workload("sqlite", f"{LIBRARIES}/libsqlite3.so.0", ("sqlite3", ":memory:", _SQL)),
    Workload("python3", "/usr/bin/python3", ("/usr/bin/python3", "-B", "-c", _PYTHON)),
    Workload("perl", "/usr/bin/perl", ("perl", "-e", _PERL)),
    Workload("libstdc++", f"{LIBRARIES}/libstdc++.so.6", (STANDARD, "40")),
)
SHORT = ("sqlite", "libstdc++")
ENGINES = pytest.mark.parametrize("engine", ["ptrace", "ebpf"])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, build: Builder) -> Path:
    """Return the directory with what workloads read: data, a key, and a program for libstdc++."""
    directory = tmp_path_factory.mktemp("workloads")
    (directory / "data").write_bytes(Random(1).randbytes(20_000))
    (directory / "standard").symlink_to(build("standard.cc", "-lstdc++"))
    if shutil.which("openssl") is not None:
        key = ["openssl", "genrsa", "-out", str(directory / "key"), "1024"]
        subprocess.run(key, check=True, capture_output=True, timeout=TIMEOUT)
    return directory


@pytest.fixture(autouse=True)
def _kernel(request: pytest.FixtureRequest) -> None:
    if request.getfixturevalue("engine") == "ebpf":
        require_bpf()


@functools.cache
def plain(line: tuple[str, ...]) -> tuple[int, str]:
    """Return status and output of a command, the same in two runs."""
    done = [
        subprocess.run(line, capture_output=True, text=True, check=False, timeout=TIMEOUT, errors="replace")
        for _ in range(2)
    ]
    (first, second) = ((run.returncode, run.stdout) for run in done)
    assert first == second
    return first


def round_of(workload: Workload, engine: str, seed: int, count: int, directory: Path, run: Runner) -> tuple[int, int]:
    """Compare one run with probepoints; return how many there were, and their hits."""
    line = workload.line(directory)

    def probed(source: str) -> Result:
        return run(source, ["--exit-status", "--", *line], ["--engine", engine], timeout=RUN_TIMEOUT)

    places = random_places(workload.path, count, Random(f"{seed} {workload.name}"))
    taken, result = accepted(workload.path, places, LIMIT, probed)
    assert len(taken) >= len(places) * 0.8, result.stderr[-2000:]
    compare(workload, seed, taken, (result.status, result.stdout), plain(tuple(line)), result)
    return len(taken), sum(counts.hits for counts in result.counts.values())


def compare(
    workload: Workload,
    seed: int,
    places: list[Place],
    found: tuple[int, str],
    expected: tuple[int, str],
    result: Result,
) -> None:
    what = f"{workload.name}, seed {seed}, {len(places)} places"
    assert found == expected, f"{what}: {result.stderr[-2000:]}"
    assert "internal error" not in result.stderr, f"{what}: {result.stderr[-2000:]}"


@ENGINES
@pytest.mark.parametrize("workload", [w for w in WORKLOADS if w.name in SHORT], ids=SHORT)
def test_some_random_instructions(workload: Workload, engine: str, directory: Path, run: Runner) -> None:
    placed, hits = round_of(workload, engine, 1, 400, directory, run)
    assert placed >= 300
    assert hits >= 100  # it depends on the program's version which of its code is executed


@pytest.mark.torture
@ENGINES
@pytest.mark.parametrize("workload", WORKLOADS, ids=[w.name for w in WORKLOADS])
def test_random_instructions_for_as_long_as_asked(
    workload: Workload, engine: str, directory: Path, run: Runner
) -> None:
    until = time.monotonic() + TORTURE_SECONDS
    seed, placed, hits = 100, 0, 0
    while seed == 100 or time.monotonic() < until:
        more = round_of(workload, engine, seed, COUNT, directory, run)
        seed, placed, hits = seed + 1, placed + more[0], hits + more[1]
    print(f"{workload.name}, {engine}: {placed} probepoints in {seed - 100} rounds, {hits} hits, 0 differences")
    assert hits >= 500
