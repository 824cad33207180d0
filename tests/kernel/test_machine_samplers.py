"""Samplers on a machine behind QEMU's stub: all of it stands still for a sample, which is one on each processor."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from guests.initramfs import PYTHON
from integration.conftest import build, run
from integration.support import TIMEOUT, await_true
from kernel.observed_machine import observed, words_of

if TYPE_CHECKING:
    from pathlib import Path

    from guests.guest import Guest
    from integration.support import Builder, Result, Runner

__all__ = ["build", "run"]

BUSY = "/tmp/hotloop"
SAMPLES = 20
FOR_EVER = str(1 << 62)


def sampled(guest: Guest, run: Runner, tmp_path: Path, module: str, modtype: str) -> Result:
    """Return what a sampler has seen that is about a module, or anything."""
    handler = "push r, cs; push r, rip; log 2; exit"
    text = f'name = "{module}"\nmodtype = {modtype}\nsampler = 25hz\nminor = 1\n{handler}\n'
    with observed(guest, run, text, tmp_path) as seen:
        await_true(lambda: len(seen.lines) >= SAMPLES or seen.client.poll() is not None, "samples", TIMEOUT)
        result = seen.stop()
    assert result.status == 0, result.stderr
    assert result.counts[1].hits == len(result.records) >= SAMPLES
    return result


@pytest.mark.parametrize("kernel", ["6.12"], indirect=True)
def test_samples_are_of_what_runs(guest: Guest, run: Runner, build: Builder, tmp_path: Path) -> None:
    """A program that never waits is on one processor at nearly each sample; the others do what they do."""
    module = build("hotloop.c")
    guest.put(BUSY, module)
    guest.start([BUSY, FOR_EVER])
    anywhere = sampled(guest, run, tmp_path, "*", "user")
    names = Counter(record["name"] for record in anywhere.records)
    cpus = Counter(record["cpu"] for record in anywhere.records)
    assert set(cpus) == set(range(guest.machine.cpus))
    assert names["hotloop"] > len(anywhere.records) / guest.machine.cpus / 2
    assert all(words_of(record)[1] & 3 == 3 for record in anywhere.records if words_of(record)[0] < 1 << 47)
    (line, *_) = [
        line.split()
        for line in guest.get(f"/proc/{next(r['pid'] for r in anywhere.records if r['name'] == 'hotloop')}/maps")
        .decode()
        .splitlines()
        if "r-xp" in line and BUSY in line
    ]
    start, end = (int(number, 16) for number in line[0].split("-"))
    inside = sampled(guest, run, tmp_path, str(module), "user")
    assert {record["name"] for record in inside.records} == {"hotloop"}
    assert all(start <= words_of(record)[0] < end for record in inside.records)


@pytest.mark.parametrize("kernel", ["6.1"], indirect=True)
def test_samples_of_the_kernel_alone(guest: Guest, run: Runner, tmp_path: Path) -> None:
    guest.start([str(PYTHON), "-S", "-c", "import os\nwhile True: os.stat('/'); sum(range(1000))"])
    result = sampled(guest, run, tmp_path, "vmlinux", "kernel")
    assert all(words_of(record)[0] >> 63 for record in result.records)
    assert {words_of(record)[1] & 3 for record in result.records} == {0}
    assert guest.run("true").returncode == 0


HASHED = "wp512"
"""A module that is all loops over what is given to it."""
HASHING = """
import socket
named = socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)
named.bind(("hash", "wp512"))
hashed, _ = named.accept()
data = bytes(1 << 14)
hashed.send(data, socket.MSG_MORE)
print("begun", flush=True)
while True:
    hashed.send(data, socket.MSG_MORE)
"""


def modules_at(guest: Guest, addresses: list[int]) -> list[str]:
    """Return whose code is at each address as the guest lists it: a module's name, "" for all else."""
    found = re.findall(
        r"^([0-9a-f]{16}) [tTwW] \S+(?:\t\[(\w+)\])?$", guest.get("/proc/kallsyms").decode(), re.MULTILINE
    )
    listed = sorted((int(address, 16), module) for address, module in found)
    starts = [start for start, _ in listed]
    return [listed[bisect_right(starts, address) - 1][1] if address >> 63 else "" for address in addresses]


@pytest.mark.parametrize("kernel", ["6.1"], indirect=True)
def test_samples_of_a_module_of_the_kernel_alone(guest: Guest, run: Runner, tmp_path: Path) -> None:
    """What runs besides, the other processor at least, is neither logged nor counted."""
    for module in ("algif_hash", HASHED):
        guest.load_module(module)
    guest.start([str(PYTHON), "-S", "-c", HASHING]).await_output("begun", TIMEOUT)
    anywhere = sampled(guest, run, tmp_path, "*", "user")
    owners = Counter(modules_at(guest, [words_of(record)[0] for record in anywhere.records]))
    assert owners[HASHED]
    assert owners[""] >= SAMPLES // guest.machine.cpus
    inside = sampled(guest, run, tmp_path, HASHED, "kmod")
    assert set(modules_at(guest, [words_of(record)[0] for record in inside.records])) == {HASHED}
    assert {words_of(record)[1] & 3 for record in inside.records} == {0}
    assert len({record["name"] for record in inside.records}) == 1
