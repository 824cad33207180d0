"""
The clock of handlers in processes: what the time stamp counter means, as told by the tool (``native.processpage``).

The tool looks at both clocks now and then, and corrects the rate: so handlers need no system call for the time. Where
the kernel does not trust the counter, there is no such clock.
"""

from __future__ import annotations

import ctypes
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.engines.inline.memory.arrays import SharedArray
from dprobes.engines.linux.machinecode import map_code
from dprobes.native.processpage import CLOCK_READING, CLOCK_READINGS, CLOCK_SIZE, CLOCK_VERSION
from dprobes.native.x86.assembler import Gpr, Operation, Shift, X86Assembler

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.inline.memory.region import Region

__all__ = ["Clock", "counter_is_trusted"]

_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_FIRST_LOOK = 0.02
"""Seconds over which the rate is found out first."""
_TRIES = 5


def counter_is_trusted() -> bool:
    """Return whether the kernel's own clock is the time stamp counter."""
    try:
        return _SOURCE.read_text().strip() in ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page")
    except OSError:
        return False


@cache
def _counter() -> Callable[[], int]:
    asm = X86Assembler()
    asm.rdtsc()
    asm.shift(Shift.SHL, Gpr.RDX, 32)
    asm.calculate(Operation.OR, Gpr.RAX, Gpr.RDX)
    asm.ret()
    function: Callable[[], int] = ctypes.CFUNCTYPE(ctypes.c_uint64)(map_code(asm.assemble()))
    return function


def _look() -> tuple[int, int]:
    """Return the counter and the time in nanoseconds of one moment, as well as can be."""
    read = _counter()
    best: tuple[int, int, int] | None = None
    for _ in range(_TRIES):
        before, now, after = read(), time.monotonic_ns(), read()
        found = (after - before, (before + after) // 2, now)
        best = min(best or found, found)
    assert best is not None
    return best[1], best[2]


class Clock:
    """Own the clock page of a region."""

    def __init__(self, region: Region) -> None:
        self._page = SharedArray(region, CLOCK_SIZE)
        self._version = 0
        self._first = _look()
        time.sleep(_FIRST_LOOK)
        self.correct()

    @property
    def address(self) -> int:
        """Where the probed process has the page."""
        return self._page.place.address

    def correct(self) -> None:
        """Let handlers know what the counter means now."""
        counter, now = _look()
        rate = ((now - self._first[1]) << 32) // max(1, counter - self._first[0])
        self._version += 1  # what the memory says may be anything
        place = CLOCK_READINGS + CLOCK_READING.size * (self._version & 1)
        CLOCK_READING.pack_into(self._page.memory, place, counter, now, rate)
        self._page.words[CLOCK_VERSION] = self._version

    def close(self) -> None:
        """Release the page."""
        self._page.close()
