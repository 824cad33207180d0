"""Hits of programs for other processors are replayed on this machine, in their order of bytes."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.gdb.processors import PROCESSORS
from integration.support import DPROBES, TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder

PROGRAM = """module "{path}";
static long calls;
handle(request, n) {{ calls++; printf("%d %d %d %s", n, request->id, request->size, request->name); }}
"""
REQUEST, STACK = 0x10000, 0x20000


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_handler_sees_registers_and_memory_as_recorded(build: Builder, tmp_path: Path, name: str) -> None:
    processor = PROCESSORS[name]
    path = processor.build(build, "handled.c")

    def number(value: int, size: int) -> bytes:
        return value.to_bytes(size, processor.order)

    word = processor.word_size
    head = number(7, 4) + number(1, 1) + bytes(3) + number(0, word)
    request = head + b"first".ljust(16, b"\0") + number(100, word)
    registers = {"arg0": REQUEST, "arg1": 5} if name != "i386" else {"esp": STACK}
    memory = {REQUEST: request, STACK: number(0, word) + number(REQUEST, word) + number(5, word)}
    hit = {"symbol": "handle", "registers": registers, "memory": {hex(at): data.hex() for at, data in memory.items()}}
    (tmp_path / "hits.jsonl").write_text(json.dumps(hit) + "\n")
    (tmp_path / "handled.dpc").write_text(PROGRAM.format(path=path))
    command = [*DPROBES, "run", "handled.dpc", "--engine", "replay=hits.jsonl", "--format", "json", "--log", "all"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
    (record,) = map(json.loads, done.stdout.splitlines())
    assert record["fields"] == {"n": 5, "id": 7, "size": 100, "name": "first"}
    assert record["word_size"] == word
    assert int(record["sp"], 16) == registers.get("esp", 0)
