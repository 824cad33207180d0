"""Exact counts in programs that others wrote, against ltrace, gdb and bpftrace."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.ebpf.objects import await_attached
from integration.support import TIMEOUT, await_line, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from integration.support import Builder, Runner

ENGINE = ("--engine", "ebpf")

SQL = (
    "create table t(a);"
    "with recursive c(n) as (select 1 union all select n + 1 from c where n < 2000) insert into t select n from c;"
    "select count(*) from t; select a from t limit 50"
)
CALLS = {
    "libc": ("libc.so.6", ("getenv", "closedir"), ("ls", "/")),
    "sqlite": ("libsqlite3.so.0", ("sqlite3_step", "sqlite3_prepare_v2"), ("sqlite3", ":memory:", SQL)),
    "openssl": ("libcrypto.so.3", ("EVP_DigestUpdate", "CRYPTO_malloc"), ("openssl", "dgst", "-sha256", "/bin/sh")),
}
PYTHON = """
[hash(float(i)) for i in range(3000)]
[int(str(i)) + 1000 for i in range(2000)]
print([x.bit_length() for x in range(1000)][-1])
"""


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


def require(*tools: str) -> None:
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")


def program_for(module: str, functions: Sequence[str]) -> str:
    text = f'name = "{module}"\n'
    return text + "".join(f"offset = {name}\nminor = {n}\nexit\n" for n, name in enumerate(functions))


@pytest.mark.parametrize("what", CALLS)
def test_a_command_is_counted_as_ltrace_counts_it(run: Runner, tmp_path: Path, what: str) -> None:
    module, functions, command = CALLS[what]
    require("ltrace", command[0])
    found = tmp_path / "ltrace"
    options = [word for name in functions for word in ("-x", f"{name}@{module}")]
    subprocess.run(
        ["ltrace", "-f", "-c", "-L", "-o", found, *options, *command],
        check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT,
    )  # fmt: skip
    rows = re.findall(r"^ *[\d.]+ +[\d.]+ +\d+ +(\d+) (\w+)$", found.read_text(), re.MULTILINE)
    counts = {name: int(number) for number, name in rows}
    result = run.command(program_for(module, functions), *command, options=ENGINE)
    expected = [counts[name] for name in functions]
    assert [result.counts[n].hits for n in range(len(functions))] == expected
    assert len(result.records) == sum(expected) > 0


def test_python_is_counted_as_gdb_counts_it(run: Runner, tmp_path: Path) -> None:
    require("gdb", "/usr/bin/python3")
    functions = ("PyLong_FromLong", "PyObject_Call")
    source = tmp_path / "calls.py"
    source.write_text(PYTHON)
    # What the interpreter does depends on its environment.
    command = ["/usr/bin/python3", "-I", "-S", str(source)]
    words = ["set breakpoint pending on", "unset environment LINES", "unset environment COLUMNS"]
    for number, name in enumerate(functions, 1):
        words += [f"break *{name}", f"ignore {number} 1000000"]
    words += ["run", "info breakpoints"]
    text = subprocess.run(
        ["gdb", "-q", "-nx", "-batch", *(w for word in words for w in ("-ex", word)), "--args", *command],
        check=True, capture_output=True, text=True, timeout=TIMEOUT, env={"PATH": "/usr/bin:/bin"},
        stdin=subprocess.DEVNULL,
    ).stdout  # fmt: skip
    expected = [int(n) for n in re.findall(r"breakpoint already hit (\d+) times?", text)]
    assert len(expected) == len(functions), text
    command = ["/usr/bin/env", "-i", "PATH=/usr/bin:/bin", *command]
    result = run.command(program_for("python3", functions), *command, options=ENGINE, stdin=subprocess.DEVNULL)
    assert [result.counts[n].hits for n in range(len(functions))] == expected


def bpftrace_counts(text: str) -> Counter[tuple[int, int]]:
    """Return what ``@[probe, pid] = count()`` printed."""
    rows = re.findall(r"^@\[(\d+), (\d+)\]: (\d+)$", text, re.MULTILINE)
    return Counter({(int(probe), int(pid)): int(count) for probe, pid, count in rows})


@contextlib.contextmanager
def bpftrace(path: Path, functions: Sequence[str], last: Path) -> Iterator[Callable[[], Counter[tuple[int, int]]]]:
    """
    Let bpftrace count the calls of functions in every process, until the program ``last`` calls ``tick``.

    Give a function that ends it, and returns the counts by the function's number and the process. An interrupt would be
    lost where bpftrace does not wait just then.
    """
    source = "".join(f"uprobe:{path}:{name} {{ @[{n}, pid] = count(); }}\n" for n, name in enumerate(functions))
    source += f'uprobe:{last}:tick {{ exit(); }} BEGIN {{ printf("go\\n"); }}'
    with running("bpftrace", "-e", source, stderr=subprocess.DEVNULL) as tracer:
        assert "Attaching" in await_line(tracer)
        assert await_line(tracer) == "go\n"

        def end() -> Counter[tuple[int, int]]:
            subprocess.run([last, "1"], check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT)
            rows = re.findall(r"^@\[(\d+), (\d+)\]: (\d+)$", tracer.communicate(timeout=TIMEOUT)[0], re.MULTILINE)
            return Counter({(int(probe), int(pid)): int(count) for probe, pid, count in rows})

        yield end


@pytest.mark.parametrize("what", CALLS)
def test_all_processes_are_counted_as_bpftrace_counts_them(build: Builder, run: Runner, what: str) -> None:
    """Both look at the same calls at the same time, in every process."""
    module, functions, command = CALLS[what]
    require("bpftrace", command[0])
    with bpftrace(_library(command[0], module), functions, build("hotloop.c")) as end_of_bpftrace:
        client, output = run.start(program_for(module, functions), [], ENGINE)
        await_attached(client)
        pids = set()
        for _ in range(5):
            with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
                pids.add(process.pid)
        result = run.end(client, output)
        expected = end_of_bpftrace()
    assert result.status == 0, result.stderr
    found = Counter((r["minor"], r["pid"]) for r in result.records)
    # Other processes of the machine are seen as well, but not for the same time.
    assert {key: n for key, n in found.items() if key[1] in pids} == {
        key: n for key, n in expected.items() if key[1] in pids
    }
    assert {pid for _, pid in found} >= pids
    assert all(count.lost == 0 and count.hits == count.records for count in result.counts.values())


def _library(command: str, soname: str) -> Path:
    text = subprocess.run(["ldd", shutil.which(command) or ""], check=True, capture_output=True, text=True).stdout
    return next(Path(line.split()[2]).resolve() for line in text.splitlines() if line.split()[0] == soname)
