"""Watchpoints by protected pages whose memory the process unmaps, moves, discards, shares or replaces."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.test_page_watchpoints import neighbours

if TYPE_CHECKING:
    from integration.support import Builder, Result, Runner

pytestmark = pytest.mark.usefixtures("page_protection")

OBJECT = "name = remapped\naddress = area+4096:area+4159\nwatchpoint = w\nminor = 1\npush 1\nlog 1\nexit\n"
COUNT = 20


def check(result: Result) -> None:
    """Verify that the hits and neighbours are those that the program has counted."""
    assert result.status == 0, result.stderr
    hits, others = map(int, result.stdout.split())
    counts = result.counts[1]
    assert (counts.hits, counts.records, counts.lost) == (hits, hits, 0)
    assert neighbours(result) == {1: others}


@pytest.mark.parametrize(
    ("mode", "verb"), [("munmap", "unmapped"), ("over", "unmapped"), ("mremap", "moved"), ("arrival", "unmapped")]
)
def test_a_watchpoint_ends_with_its_memory(build: Builder, run: Runner, mode: str, verb: str) -> None:
    result = run.command(OBJECT, build("remapped.c", "-pthread"), mode, COUNT)
    check(result)
    assert re.search(
        rf"INVALID_OFFSET in process \d+: the process has {verb} the memory at 0x[0-9a-f]+000", result.stderr
    )


@pytest.mark.parametrize("mode", ["neighbours", "dontneed", "readonly", "vfork", "exec"])
def test_a_watchpoint_outlives_other_changes(build: Builder, run: Runner, mode: str) -> None:
    result = run.command(OBJECT, build("remapped.c", "-pthread"), mode, COUNT)
    check(result)
    assert "INVALID_OFFSET" not in result.stderr


def test_forks_and_mappings_change_while_threads_write(build: Builder, run: Runner) -> None:
    source = OBJECT.replace("4159", "4127") + (
        "address = area+12288:area+12311\nwatchpoint = w\nminor = 2\npush 1\nlog 1\nexit\n"
        "address = area+16384:area+16407\nwatchpoint = w\nminor = 3\npush 1\nlog 1\nexit\n"
    )
    result = run.command(source, build("remapped.c", "-pthread"), "all", COUNT)
    assert result.status == 0, result.stderr
    assert result.counts[1].hits == int(result.stdout)
    assert result.counts[2].hits == COUNT
    assert "the process has moved the memory at" in result.stderr


def test_a_core_file_has_the_bytes_of_protected_pages(build: Builder, run: Runner, tmp_path: Path) -> None:
    if Path("/proc/sys/kernel/core_pattern").read_text(encoding="ascii").strip() != "core":
        pytest.skip("processor: this machine does not write core files into the current directory")
    command = ["--", str(build("remapped.c", "-pthread")), "core", str(COUNT)]
    result = run(OBJECT, command, cwd=tmp_path)
    place, count = result.stdout.split()
    assert result.counts[1].hits == int(count)
    (core,) = tmp_path.glob("core*")
    headers = subprocess.run(["readelf", "-lW", core], check=True, capture_output=True, text=True).stdout
    pieces = [[int(field, 16) for field in row.split()[1:5]] for row in headers.splitlines() if " LOAD " in row]
    address = int(place, 16)
    (found,) = [
        core.read_bytes()[offset + address - start :][:4096]
        for offset, start, _, size in pieces
        if start <= address < start + size
    ]
    expected = struct.pack("<13Q", 0, 0, 0, COUNT, 0, 0, 0, 0, COUNT, 0, 0, 0, 0)
    assert found == expected + bytes(n * 7 % 256 for n in range(4096 - len(expected)))


SMALL = """
struct page { volatile unsigned object[16], neighbour; char rest[4096 - 68]; } area[3] __attribute__((aligned(4096)));

static int call(int number, long one, long two, long three)
{
	int result;
	__asm__ volatile("int $0x80" : "=a"(result) : "a"(number), "b"(one), "c"(two), "d"(three) : "memory");
	return result;
}

void _start(void)
{
	int zero = call(5, (long)"/dev/zero", 0, 0);
	for (int n = 0; n < 20; n++) {
		area[1].object[n % 16] = n;
		__asm__ volatile("lock incl %0" : "+m"(area[1].neighbour));
	}
	if (call(3, zero, (long)&area[1].object[4], 16) != 16 || area[1].object[3] != 19 || area[1].object[4])
		call(1, 2, 0, 0);
	call(91, (long)&area[1], 4096, 0);
	call(1, area[0].neighbour, 0, 0);
}
"""


def test_a_program_of_32_bits(run: Runner, tmp_path: Path) -> None:
    source, small = tmp_path / "small.c", tmp_path / "small"
    source.write_text(SMALL)
    options = ["-m32", "-O1", "-g", "-ffreestanding", "-nostdlib", "-static", "-fno-pic", "-fcf-protection=none"]
    subprocess.run(["gcc", *options, "-o", small, source], check=True)
    result = run.command(OBJECT.replace("remapped", f'"{small}"'), small)
    assert result.status == 0, result.stderr
    assert result.counts[1].hits == 21
    assert neighbours(result) == {1: 20}
    assert "the process has unmapped the memory at" in result.stderr
