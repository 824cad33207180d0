"""USDT probes that others have made: python3, libstdc++, postgres; and what bpftrace says of the same process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.support import NOBODY, TIMEOUT, as_nobody

if TYPE_CHECKING:
    from collections.abc import Callable

    from integration.support import Builder, Runner

ROOT = Path(__file__).parents[3]


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def interpreter_with_probes() -> str:
    for path in sorted(Path("/usr/bin").glob("python3.[0-9]*")):
        notes = subprocess.run(["readelf", "-n", str(path)], capture_output=True, text=True, check=False).stdout
        if "function__entry" in notes:
            return str(path)
    pytest.skip("no Python of this machine was built with USDT probes (--with-dtrace)")


PYTHON_CALLS = """name = "{name}"
offset = usdt:python:function__return
minor = 1
push usdt, 3
log 1
push 100
push usdt, 2
log str
exit
"""

PYTHON_PROGRAM = "def fact(n):\n return 1 if n < 2 else n * fact(n - 1)\ndef once(): pass\nonce()\nfact(5)"


def _python_calls(data: str) -> tuple[int, str]:
    raw = bytes.fromhex(data)
    return int.from_bytes(raw[:8], "little"), raw[11:].decode()


def test_calls_of_python_functions_have_their_names_and_lines(run: Runner, engine: list[str]) -> None:
    python = interpreter_with_probes()
    result = run(PYTHON_CALLS.format(name=Path(python).name), ["--", python, "-S", "-c", PYTHON_PROGRAM], engine)
    calls = [_python_calls(record["data"]) for record in result.records]
    # The entry is hit where C calls a function only, in this Python; the return always is.
    assert calls[-7:] == [(3, "once"), *[(2, "fact")] * 5, (5, "<module>")]


def test_exceptions_are_thrown_and_caught_as_the_program_says(build: Builder, run: Runner, engine: list[str]) -> None:
    library = Path("/usr/lib/x86_64-linux-gnu/libstdc++.so.6")
    notes = subprocess.run(["readelf", "-n", str(library)], capture_output=True, text=True, check=False).stdout
    if "libstdcxx" not in notes:
        pytest.skip("libstdc++.so.6 has no USDT probes here")
    program = build("throwing.cc", "-lstdc++")
    example = (ROOT / "examples" / "exceptions-thrown.rpn").read_text()
    result = run(example, ["--", str(program)], [*engine, "--templates", str(ROOT / "examples" / "templates")])
    assert result.stdout == "caught 3\n"
    thrown, caught = (bytes.fromhex(record["data"]) for record in result.records)
    assert thrown[:8] == caught  # the same object
    assert thrown[8:] == b"\x01\x01\0i"  # of the type int


@pytest.mark.skipif(shutil.which("bpftrace") is None, reason="bpftrace is not installed")
def test_bpftrace_says_the_same_of_the_same_process(usdt: Callable[..., Path], run: Runner) -> None:
    require_bpf()
    require_initial_namespace()
    program = usdt("-O0", "-DPLAIN")
    script = (
        f'usdt:{program}:demo:many {{ printf("many %d %d\\n", (int32)arg0, (int32)arg1); }} '
        f'usdt:{program}:demo:guarded {{ printf("guarded %d\\n", arg0); }}'
    )
    text = (
        f'name = "{program}"\noffset = usdt:demo:many\nminor = 1\npush usdt, 2\npush usdt, 1\nlog 2\nexit\n'
        "offset = usdt:demo:guarded\nminor = 2\npush usdt, 1\nlog 1\nexit\n"
    )
    result = run(
        text, ["--", "bpftrace", "-e", script, "-c", f"{program} 6"], ["--engine", "ebpf"], timeout=2 * TIMEOUT
    )
    theirs = [line for line in result.stdout.splitlines() if re.fullmatch(r"(many -?\d+ -?\d+|guarded \d+)", line)]
    ours = [f"many {signed(words[0], 64)} {signed(words[1] & 0xFFFFFFFF, 32)}" for words in result.words(1)]
    assert len(ours) == 6
    # Both the program and bpftrace print the same lines.
    assert sorted(theirs) == sorted([*ours, *ours, *(f"guarded {words[0]}" for words in result.words(2))])


QUERIES = """name = "{postgres}"
offset = usdt:postgresql:query__start
minor = 1
push 100
push usdt, 1
log str
exit
offset = usdt:postgresql:transaction__commit
minor = 2
exit
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become the user of a database")
def test_a_database_gets_the_queries_that_it_was_sent(run: Runner, engine: list[str], tmp_path: Path) -> None:
    programs = [shutil.which(name) for name in ("postgres", "initdb", "setpriv")]
    if None in programs:
        pytest.skip("postgresql is not installed")
    postgres, initdb, setpriv = (str(Path(str(path)).resolve()) for path in programs)
    notes = subprocess.run(["readelf", "-n", postgres], capture_output=True, text=True, check=False).stdout
    if "query__start" not in notes:
        pytest.skip("postgres was built without USDT probes (--enable-dtrace)")
    directory = Path(tempfile.mkdtemp(prefix="dprobes-postgres-"))  # pytest's own is root's alone
    try:
        os.chown(directory, NOBODY, NOBODY)
        subprocess.run(
            [initdb, "-D", str(directory / "data"), "-A", "trust", "-U", "postgres", "--no-sync"],
            check=True, capture_output=True, timeout=5 * TIMEOUT, cwd=directory, **as_nobody(),
        )  # fmt: skip
        (tmp_path / "queries").write_text("select 40+2 as answer;\nselect version();\n")
        user = [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        command = [*user, postgres, "--single", "-D", str(directory / "data"), "postgres"]
        with (tmp_path / "queries").open() as queries:
            result = run(
                QUERIES.format(postgres=postgres), ["--", *command], engine, stdin=queries, timeout=3 * TIMEOUT
            )
        assert 'answer = "42"' in result.stdout, result.stdout + result.stderr
        texts = [bytes.fromhex(record["data"])[3:].decode() for record in result.records if record["minor"] == 1]
        assert [text.strip() for text in texts] == ["select 40+2 as answer;", "select version();"]
        assert result.counts[2].hits >= 2
    finally:
        shutil.rmtree(directory)
