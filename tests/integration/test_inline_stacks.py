"""Call stacks that handlers in the process take: frame by frame those that the tracer finds at breakpoints."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from integration.support import DPROBES, TIMEOUT, await_message, environment, running

if TYPE_CHECKING:
    from collections.abc import Sequence

    from integration.support import Builder

FLAGS = ("-O2", "-fomit-frame-pointer", "-fno-optimize-sibling-calls", "-pthread", "-lstdc++")
SQL = """
drop table if exists t; create table t(a, b); create index i on t(a);
insert into t with recursive c(x) as (select 1 union all select x + 1 from c where x < 300) select x, x * 7 % 41 from c;
select count(*), sum(a) from t join t as u using (a) where t.b > 10 group by t.b;
.print done
"""
PYTHON = """
import json, re
def deep(n): return sorted([n], key=lambda k: deep(n - 1) if n else len(json.dumps({"a": [1, 2]})))
for n in range(4): deep(n); re.compile("a[b-c]*" + str(n)); "".join([str(n)] * 50)
"""
LINES = "import sys\nfor line in sys.stdin: exec(eval(line)); print('done', flush=True)"
"""What executes lines of input."""


def seen(engine: str, text: str, command: Sequence[str], *lines: str) -> tuple[str, str]:
    """Return what a handler prints while a process that waits for lines works on some, and the summary."""
    with running(*command, stdin=subprocess.PIPE) as target, tempfile.TemporaryFile("w+") as printed:
        assert target.stdin is not None
        assert target.stdout is not None
        # What is done once, as loading a library, is done before.
        target.stdin.write(lines[0])
        target.stdin.flush()
        while target.stdout.readline() != "done\n":
            pass
        client = subprocess.Popen(
            [*DPROBES, "run", "-e", text, "--engine", engine, "-p", str(target.pid)],
            stdout=printed,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        await_message(client, "Ctrl-C ends the run")
        for line in lines:
            target.stdin.write(line)
            target.stdin.flush()
            while target.stdout.readline() != "done\n":
                pass
        client.send_signal(signal.SIGINT)
        _, errors = client.communicate(timeout=TIMEOUT)
        printed.seek(0)
        output = printed.read()
        target.stdin.close()
        assert target.wait(TIMEOUT) == 0
    return output, errors


def stacks_in(output: str) -> Counter[str]:
    """Return the stacks that were printed, each behind a line that ends with 'at', and how often."""
    found = (each.rpartition("\n")[0] for each in output.partition("@[")[0].split(" at\n")[1:])
    return Counter(each.strip() for each in found)


def rows_in(output: str) -> Counter[str]:
    """Return the stacks that are the keys of a table, and their numbers."""
    rows = (each.partition("]: ") for each in output.split("@[")[1:])
    return Counter({stack.strip(): int(number.split()[0]) for stack, _, number in rows})


def test_stacks_of_a_program_without_frame_pointers_are_those_of_the_tracer(build: Builder) -> None:
    program = build("stackwork.cc", *FLAGS)
    text = f'"{program}":here(n) {{ printf("at\\n%s", ustack()); @[ustack(40)] = count(); }}'
    (output, summary), (expected, other) = (
        seen(engine, text, [str(program)], "\n", "\n") for engine in ("inline", "ptrace")
    )
    assert "  inline engine\n" in summary
    assert "inline" not in other
    stacks = stacks_in(expected)
    assert stacks.total() == 2 * (60 + 1 + 6 + 2 + 4 + 100 + 1)
    assert len(stacks) >= 60 + 1 + 1 + 2 + 4 + 2 + 1
    # From a signal handler on a stack of its own it goes on at a place that was not copied.
    ((cut, count),) = (stacks_in(output) - stacks).items()
    ((whole, _),) = (stacks - stacks_in(output)).items()
    beginning, end = cut.rsplit("\n", 1)
    assert (count, end.strip()) == (2, "<the stack cannot be read here>")
    assert whole.startswith(beginning)
    assert "__restore_rt" in beginning
    rows, others = rows_in(output), rows_in(expected)
    assert rows.total() == others.total() == stacks.total()
    assert len(rows - others) == len(others - rows) == 1


@pytest.mark.parametrize(
    ("probe", "command", "lines"),
    [
        ("libc.so.6:malloc", ("/usr/bin/sqlite3",), (SQL, SQL)),
        ("/usr/bin/python3:PyDict_SetItem", ("/usr/bin/python3", "-c", LINES), (f"{PYTHON!r}\n",) * 2),
    ],
    ids=["sqlite", "python"],
)
def test_tables_of_real_programs_have_the_same_stacks(probe: str, command: Sequence[str], lines: Sequence[str]) -> None:
    text = f"{probe} {{ @[ustack()] = count(); }}"
    (output, summary), (expected, _) = (seen(engine, text, command, *lines) for engine in ("inline", "ptrace"))
    assert "  inline engine\n" in summary
    rows = rows_in(expected)
    assert len(rows) > 5
    assert rows_in(output) == rows
