"""A program with many definitions: each has its own handler, counts and limits, and they share programs and links."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ebpf.ebpf_engine import EbpfEngine
from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features
from dprobes.manager.inserter import ring_size
from integration.ebpf.insessions import job_for
from integration.ebpf.kernel import descriptors, has_begun, require_bpf, require_initial_namespace
from integration.support import TIMEOUT, await_true
from support.attachments import attached

if TYPE_CHECKING:
    from integration.support import Builder, Runner

ENGINE = ("--engine", "ebpf")
CALLS = 9
HANDLERS = (
    ("", "push {n}; log 1; exit", CALLS),
    ("maxhits = 4", "push {n}; push r, eip; pop lv, {n}; log 1; exit", 4),
    ("passcount = 2", "push {n}; inc lv, {n}; log 1; exit", CALLS - 2),
    ("", "push {n}; push r, esp; log 2; remove", 1),
    ("return = yes", "push {n}; log 1; exit", CALLS),
    ("passcount = 1\nmaxhits = 3", "push {n}; log 1; push r, esp; push 8; log mrf; exit", 3),
)
"""What definitions have besides a place, their handlers, and how many records those leave."""


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()
    if Feature.UPROBE_MULTI not in Features():
        pytest.skip("this kernel has no uprobe_multi links, so there cannot be many definitions")


def definitions(count: int) -> str:
    text = [f'name = "{{path}}"\nvars = {count}\n']
    for number in range(count):
        header, handler, _ = HANDLERS[number % len(HANDLERS)]
        lines = handler.format(n=number).replace("; ", "\n")
        text.append(f"offset = many_{number}\nminor = {number + 1}\n{header}\n{lines}\n\n")
    return "".join(text)


def test_many_definitions_share_links_and_each_keeps_its_own_handler_and_limits(build: Builder, run: Runner) -> None:
    count = 300
    program = build("many.c")
    client, output = run.start(definitions(count).format(path=program), [], ENGINE)
    await_true(lambda: has_begun(client.pid), "the beginning")
    assert len(list(Path(f"/proc/{client.pid}/fd").iterdir())) < 150
    subprocess.run([program, str(CALLS)], check=True, timeout=TIMEOUT, stdout=subprocess.DEVNULL)
    expected = {number + 1: HANDLERS[number % len(HANDLERS)][2] for number in range(count)}
    await_true(lambda: run_records(output) >= sum(expected.values()), "the records")
    result = run.end(client, output)
    assert result.status == 0, result.stderr
    assert Counter(record["minor"] for record in result.records) == expected
    assert {minor: result.counts[minor].records for minor in expected} == expected
    for record in result.records:
        data = bytes.fromhex(record["data"])
        assert record["minor"] - 1 in {int.from_bytes(data[at : at + 8], "little") for at in (0, 8)}, record


def test_many_definitions_take_the_place_of_as_many_with_few_descriptors(build: Builder) -> None:
    many = build("many.c")
    engine = EbpfEngine(replaceable=True)
    text = "".join(f"offset = many_{n}\nminor = {n + 1}\npush {n}\nlog 1\nexit\n" for n in range(200))
    before = descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with attached(engine, job_for(many, "offset = many_0\nabort\n")):
        pass  # what is found out about the kernel once takes descriptors, too
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + 150, hard))
    try:
        with attached(engine, job_for(many, text)) as old, attached(engine, job_for(many, text, replaces=old)) as new:
            subprocess.run([many, "2"], check=True, timeout=TIMEOUT, stdout=subprocess.DEVNULL)
            assert [counts.hits for counts in new.counts()] == [2] * 200
            assert not any(counts.hits for counts in old.counts())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_program_takes_little_memory_besides_its_ring(build: Builder) -> None:
    job = job_for(build("many.c"), "offset = many_0\npush 1\nlog 1\nexit\n")
    ring = 1 << 18
    before = locked_memory()
    with attached(EbpfEngine(replaceable=True, ring_size=ring), job):
        assert ring < locked_memory() - before < 2 * ring + (1 << 17) * (os.cpu_count() or 1)


def locked_memory() -> int:
    """Return the bytes of the maps that this process holds, as the kernel accounts for them."""
    sizes = {}
    for each in list(Path("/proc/self/fdinfo").iterdir()):
        with contextlib.suppress(FileNotFoundError):
            fields = dict(line.split(":\t") for line in each.read_text().splitlines() if ":\t" in line)
            if "map_id" in fields:  # a mapping of a map has a descriptor as well
                sizes[fields["map_id"]] = int(fields["memlock"])
    return sum(sizes.values())


@pytest.mark.parametrize(
    ("others", "size"), [(0, 4 << 20), (7, 4 << 20), (8, 2 << 20), (60, 512 << 10), (500, 256 << 10)]
)
def test_rings_become_smaller_beside_many_programs(others: int, size: int) -> None:
    assert ring_size(others) == size


def run_records(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0
