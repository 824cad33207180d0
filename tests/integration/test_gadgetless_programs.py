"""
Programs that hold no code to return from a signal, as static ones with musl: it is put into padding, and taken out.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from integration.support import (
    TIMEOUT,
    await_traced,
    await_true,
    code_is_original,
    executable_segments,
    is_traced,
    load_bias,
    memory_at,
    processor_time,
    read_memory,
    running,
    tracer_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner

INLINE = ["--engine", "inline"]
COUNTING = "name = hotloop\noffset = tick\nabort\n"
RETURN = b"\xb8\x0f\0\0\0\x0f\x05", b"\x48\xc7\xc0\x0f\0\0\0\x0f\x05"


@pytest.fixture
def program(build: Builder) -> Path:
    path = build("hotloop.c", "-static", compiler="musl-gcc")
    data = path.read_bytes()
    assert not any(code in data for code in RETURN), "the program would not need it"
    return path


def code_pages(pid: int, path: Path) -> bytes:
    """Return the whole pages of the program's code, with what is behind it."""
    ((_, start, size),) = executable_segments(path)
    return read_memory(pid, load_bias(pid, path) + start, size + -(start + size) % 4096)


@pytest.mark.parametrize("is_killed", [False, True], ids=["ended", "killed"])
def test_a_program_has_its_jumps_and_is_as_before_afterwards(program: Path, run: Runner, is_killed: bool) -> None:
    with running(program, 1 << 40) as target:
        before, first = code_pages(target.pid, program), memory_at(target.pid, program, "tick", 1)[0]
        client, output = run.start(COUNTING, ["-p", str(target.pid)], INLINE)
        await_traced(target.pid)
        await_true(lambda: 0xCC != memory_at(target.pid, program, "tick", 1)[0] != first, "a jump")
        if is_killed:
            os.kill(tracer_of(target.pid), signal.SIGKILL)
            client.communicate(timeout=TIMEOUT)
        else:
            used = processor_time(target.pid)
            await_true(lambda: processor_time(target.pid) > used + 5, "hits")
            result = run.end(client, output)
            assert result.counts[0].executed.startswith("inline ("), result.stderr
            assert result.counts[0].hits > 0
        await_true(lambda: not is_traced(target.pid), "the end of tracing")
        assert code_is_original(target.pid, program)
        if not is_killed:
            assert code_pages(target.pid, program) == before
        assert target.poll() is None
