"""
All functions of a library are probed at once, with an empty handler, while tests of others run on it.

The tests are Python's own, in a program that is linked with libpython, and command lines of other programs of which all
is to be seen in the output. They end as they do without probes, each of them: docs/explanation/measurements.md says how
many there were.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.embedded_python import LIBRARIES, library, python_program
from integration.support import PROGRAMS, TIMEOUT
from integration.test_random_instructions import WORKLOADS, directory, plain

if TYPE_CHECKING:
    from integration.support import Builder, Result, Runner
    from integration.test_random_instructions import Workload

__all__ = ["directory"]  # a fixture

pytestmark = pytest.mark.torture

SECONDS = 20 * TIMEOUT

SINGLE = [workload for workload in WORKLOADS if workload.name in ("perl", "sqlite")]
"""Command lines of one process each: in each process everything is planned anew."""

GENERAL = (
    "test_json", "test_re", "test_struct", "test_dict", "test_set", "test_bytes", "test_float", "test_long",
    "test_generators", "test_coroutines", "test_grammar", "test_descr", "test_ctypes", "test_math", "test_decimal",
    "test_zlib", "test_functools", "test_collections", "test_memoryview", "test_fork1", "test_mmap", "test_posix",
    "test_select", "test_time", "test_locale", "test_thread", "test_queue", "test_fileio", "test_wait4",
    "test_strftime",
)  # fmt: skip
"""Those that start few processes."""
SYSTEM = (
    "test_struct", "test_float", "test_math", "test_fork1", "test_mmap", "test_select", "test_time", "test_locale",
    "test_thread", "test_queue", "test_fileio", "test_strftime",
)  # fmt: skip
CRYPTOGRAPHY = (
    "test_hashlib", "test_hmac", "test_random", "test_secrets", "test_ssl.ContextTests",
    "test_ssl.MemoryBIOTests", "test_ssl.SSLObjectTests", "test_ssl.ThreadedTests",
)  # fmt: skip
DATABASE = tuple(
    f"test_sqlite3.test_{name}"
    for name in (
        "backup", "dbapi", "dump", "factory", "hooks", "regression", "transactions", "types", "userfunctions",
    )
)  # fmt: skip
SUITES = {
    "libc.so.6": SYSTEM,
    "libpython3.11.so.1.0": GENERAL,
    "libcrypto.so.3": CRYPTOGRAPHY,
    "libsqlite3.so.0": DATABASE,
}


SQL = """
pragma journal_mode = wal; pragma wal_autocheckpoint = 50;
create table t(a integer primary key, b text, c real, d blob, unique(b, a)) strict;
create virtual table f using fts5(x); create virtual table r using rtree(id, low, high);
with recursive n(i) as (select 1 union all select i + 1 from n where i < 5000)
 insert into t select i, printf("row %d", i * 7919 % 10007), i / 3.0, zeroblob(i % 200) from n;
create index by_c on t(c desc) where a % 2; create view v as select b, c from t where a > 100;
create trigger g after update on t begin insert into f values(new.b); end;
insert into r select a, c, c + 1 from t where a % 7 = 0; update t set b = upper(b) where a % 3 = 0;
begin; delete from t where a % 5 = 0; savepoint s; delete from t; rollback to s; commit;
select count(*), sum(length(d)), round(avg(c), 6) from t; select count(*) from f where f match "row";
select count(*) from r where low between 100 and 700;
select b, row_number() over (order by c desc), lag(b) over (order by b) from v limit 20;
select json_group_array(a) from (select a from t order by b limit 50); reindex; analyze; vacuum;
pragma integrity_check;
"""


def source(path: Path) -> str:
    return f'name = "{path}"\noffset = *\nminor = 1\nabort\n'


def command(build: Builder, outcomes: Path, modules: tuple[str, ...]) -> list[str]:
    more = ""
    if modules == DATABASE:
        more = str(max(Path.home().glob(".pyenv/versions/3.11*/lib/python3.11/test"), default=""))
        if not more:
            pytest.skip("tests of sqlite3 are in no package of Debian: pyenv install 3.11")
    environment = ["env", "-i", "PATH=/usr/bin:/bin", "LC_ALL=C.UTF-8", "PYTHONHASHSEED=0", "HOME=/tmp"]
    program = [str(python_program(build)), str(PROGRAMS / "run_python_tests.py"), str(outcomes), more]
    return [*environment, *program, *modules]


def outcomes_of(file: Path) -> dict[str, str]:
    lines = [line.rpartition(" ") for line in file.read_text().splitlines()]
    return {name: how for name, _, how in lines}


@pytest.mark.parametrize("name", LIBRARIES)
def test_pythons_own_tests_end_as_without_probes(build: Builder, run: Runner, name: str, tmp_path: Path) -> None:
    path = library(name)
    unprobed, probed = tmp_path / "unprobed", tmp_path / "probed"
    done = subprocess.run(
        command(build, unprobed, SUITES[name]), capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    options = ["--engine", "inline"]
    result = run(source(path), ["--exit-status", "--", *command(build, probed, SUITES[name])], options, timeout=SECONDS)
    assert result.status == 0, result.stderr
    wanted, found = outcomes_of(unprobed), outcomes_of(probed)
    differing = {each: (wanted[each], found.get(each)) for each in wanted if found.get(each) != wanted[each]}
    print(f"\n{name}: {len(wanted)} tests, {len(differing)} differ {differing}; {summary_of(result)}")
    assert not differing, result.stderr
    assert found.keys() == wanted.keys()
    assert len(hits_of(result)) > 100


def hits_of(result: Result) -> list[int]:
    """Return the hits of all functions that were hit."""
    rows = [line.split() for line in result.stderr.splitlines() if line.startswith("0,1 ")]
    return [int(row[2]) for row in rows if row[2].isdigit()]


def summary_of(result: Result) -> str:
    hits = hits_of(result)
    return f"{len(hits)} functions hit, {sum(hits)} hits"


@pytest.mark.parametrize("workload", SINGLE, ids=lambda workload: workload.name)
def test_programs_print_what_they_do_without_probes_in_libc(run: Runner, workload: Workload, directory: Path) -> None:
    path = library("libc.so.6")
    line = workload.line(directory)
    options = ["--engine", "inline"]
    result = run(source(path), ["--exit-status", "--", *line], options, timeout=SECONDS)
    print(f"\n{workload.name}: {summary_of(result)}")
    assert (result.status, result.stdout) == plain(tuple(line)), result.stderr
    assert len(hits_of(result)) > 20


def test_cryptography_measures_itself(run: Runner) -> None:
    path = library("libcrypto.so.3")
    for what in ("-evp aes-256-gcm", "-evp chacha20-poly1305", "-evp sha512", "rsa2048", "ecdsap256", "ed25519"):
        measuring = ["openssl", "speed", "-seconds", "1", *what.split()]
        result = run(source(path), ["--exit-status", "--", *measuring], ["--engine", "inline"], timeout=SECONDS)
        assert result.status == 0, result.stderr
        assert len(hits_of(result)) > 100
        print(f"\n{what}: {summary_of(result)}")


def test_a_database_is_sound(run: Runner, tmp_path: Path) -> None:
    line = ["sh", "-c", f"sqlite3 {tmp_path}/$0 '{SQL}' 2>&1"]
    wanted = subprocess.run([*line, "plain"], capture_output=True, text=True, timeout=TIMEOUT, check=True).stdout
    assert wanted.endswith("ok\n")
    path = library("libsqlite3.so.0")
    result = run(source(path), ["--exit-status", "--", *line, "probed"], ["--engine", "inline"], timeout=SECONDS)
    assert (result.status, result.stdout) == (0, wanted), result.stderr
    assert (tmp_path / "probed").read_bytes() == (tmp_path / "plain").read_bytes()
    print(f"\n{summary_of(result)}")
