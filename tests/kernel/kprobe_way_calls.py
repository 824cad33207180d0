"""What tests call in guests to compare how the kernel comes to kprobes with what is said of that beforehand."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from dprobes.platform.linux import perf_calls
from dprobes.target.kernel.kprobe_ways import KprobeWay, KprobeWays
from dprobes.target.kernel.running_kernel import RunningKernel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.target.kernel.kernel_symbols import KernelSymbol

__all__ = ["differing_ways"]

LIST = Path("/sys/kernel/debug/kprobes/list")
BATCH = 60
PATIENCE = 90.0
"""Seconds in which the kernel makes the jumps: it waits until all tasks have been elsewhere, perhaps twice."""


def _kernel_ways() -> dict[int, str]:
    """Return the kernel's word for each kprobe that it has."""
    found = {}
    for line in LIST.read_text().splitlines():
        flags = re.findall(r"\[(\w+)\]", line)
        found[int(line.split()[0], 16)] = next((f for f in flags if f in ("FTRACE", "OPTIMIZED")), "")
    return found


def _said(way: KprobeWay) -> tuple[str, ...]:
    """Return the kernel's words that agree with what is said."""
    match way:
        case KprobeWay.FTRACE:
            return ("FTRACE",)
        case KprobeWay.JUMP:
            return ("OPTIMIZED",)
        case KprobeWay.JUMP_SINCE:
            return ("OPTIMIZED", "")
    return ("",)


def differing_ways(seed: int, count: int, optimization: int = 1) -> tuple[dict[str, int], list[str], int]:
    """
    Put kprobes on ``count`` random instructions, each in a function of its own; ``optimization`` is what is told the
    kernel.

    Return how many there were of each way as the kernel says, a line for each of which something else was said, and how
    many it refused.
    """
    Path("/proc/sys/debug/kprobes-optimization").write_text(f"{optimization}\n")
    random, kernel = Random(seed), RunningKernel()
    ways = KprobeWays(kernel)
    functions = _functions(kernel)
    random.shuffle(functions)
    counts: Counter[str] = Counter()
    differing: list[str] = []
    refused = 0
    unit = perf_calls.kprobe_unit()
    while functions and counts.total() < count:
        expected: dict[int, KprobeWay] = {}
        events = []
        for function in functions[:BATCH]:
            said = ways.ways(function)
            if not said:
                continue
            # The first instructions of functions are few among all: so each third place is one.
            address = function.address if random.random() < 0.3 else random.choice(list(said))
            if kernel.refusal(address) is not None:
                continue
            try:
                events.append(perf_calls.open_kprobe(unit, address))
            except OSError:
                refused += 1
                continue
            expected[address] = said[address]
        del functions[:BATCH]
        found = _settled({address: _said(way) for address, way in expected.items()})
        for address, way in expected.items():
            counts[found.get(address, "gone")] += 1
            if found.get(address, "gone") not in _said(way):
                differing.append(f"{kernel.name_of(address)}: said {way.value}, is '{found.get(address, 'gone')}'")
        for event in events:
            os.close(event)
    return dict(counts), differing, refused


def _functions(kernel: RunningKernel) -> list[KernelSymbol]:
    """Return the kernel's functions, without what is only space before them (``__pfx_``)."""
    start, end = kernel.base_of(""), kernel.symbol("_etext", "").address
    return [s for s in kernel.symbols.matching("[!_]*", "") if start < s.address < end]


def _settled(expected: dict[int, tuple[str, ...]]) -> dict[int, str]:
    """Return what the kernel has made of kprobes, when it is as expected or does not change any more."""
    until = time.monotonic() + PATIENCE
    while True:
        found = _at_their_places(expected)
        agree = all(found.get(address, "gone") in said for address, said in expected.items())
        if agree or time.monotonic() > until:
            return found
        time.sleep(0.2)


def _at_their_places(expected: Iterable[int]) -> dict[int, str]:
    """Return the kernel's words; what it has put behind a landing pad counts for the place before that."""
    listed = _kernel_ways()
    return {a: listed[a] if a in listed else listed[a + 4] for a in expected if a in listed or a + 4 in listed}
