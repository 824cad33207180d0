"""A record is of an instruction that completed, however busy the machine is; the kernel runs the handler before it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.ebpf.test_cold_pages import PAGE, make_cold

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.support import Builder, Runner

ENGINE = ("--engine", "ebpf")
LOAD = "name = jumps\noffset = at_load\nminor = 1\n{extra}push r, arg0\nlog 1\nexit\n"


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Let others want every CPU: a thread often loses its own between handler and instruction."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.parametrize("threads", [1, 8])
def test_what_faults_leaves_no_record_on_a_busy_machine(build: Builder, run: Runner, threads: int) -> None:
    program = build("jumps.c")
    with busy():
        result = run.command(LOAD.format(extra=""), program, 4000 // threads, threads, options=ENGINE)
    assert result.stdout == "2000 2000\n"
    assert result.counts[1].hits == result.counts[1].records == 2000
    # Each record is of an instruction that came through.
    assert 8 not in {words[0] for words in result.words()}
    assert len(result.records) == 2000


def test_logonfault_keeps_them_all(build: Builder, run: Runner) -> None:
    result = run.command(LOAD.format(extra="logonfault = yes\n"), build("jumps.c"), 250, 4, options=ENGINE)
    assert result.stdout == "500 500\n"
    assert result.counts[1].hits == result.counts[1].records == len(result.records) == 1000


def test_an_instruction_that_ends_its_program_leaves_no_record(build: Builder, run: Runner) -> None:
    source = "name = crash\noffset = main\nminor = 1\n{extra}exit\n"
    for extra, count in (("", 0), ("logonfault = yes\n", 1)):
        options = [*ENGINE, "--exit-status"]
        result = run(source.format(extra=extra), ["--", str(build("crash.S"))], options)
        assert result.status == 128 + signal.SIGSEGV, result.stderr
        assert (result.counts[1].hits, len(result.records)) == (count, count)


def test_an_instruction_whose_page_comes_into_memory_leaves_one_record(
    build: Builder, run: Runner, tmp_path: Path
) -> None:
    """The kernel executes it again after the page fault; that is no other hit."""
    pages, threads = 64, 4
    data = tmp_path / "data"
    data.write_bytes(b"".join(bytes([n]) * PAGE for n in range(pages)))
    make_cold(data)
    source = "name = touch\noffset = at_read\nminor = 1\nexit\noffset = at_write\nminor = 2\nexit\n"
    result = run.command(source, build("touch.c"), data, threads, options=ENGINE)
    assert int(result.stdout) >= 2 * pages * threads
    for minor in (1, 2):
        assert result.counts[minor].hits == result.counts[minor].records == pages * threads
