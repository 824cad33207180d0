"""The maps of a program's handlers, in memory that probed processes share with this one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.bpf.lower.lowering_request import Tables
from dprobes.bpf.map_layouts import PROBE_ENTRY_SIZE, STATUS_SIZE, MapName, ProbeField, power_of_two
from dprobes.engines.inline.memory.shared_memory import Region, SharedArray, SharedHash
from dprobes.engines.inline.memory.shared_rings import SharedRings
from dprobes.engines.inline.memory.shared_state import PROBES_MAX, SharedState
from dprobes.engines.keyed_table_maps import zeros_size
from dprobes.engines.shared_globals import mapped_size
from dprobes.native.generated_code import MapPlace
from dprobes.native.process_page import CLOCK_READING, CLOCK_READINGS, CLOCK_SIZE, CLOCK_VERSION, HAS_ENDED
from dprobes.native.routines.handler_ring import RingShape
from dprobes.native.x86.x86_assembler import Gpr, Operation, Shift, X86Assembler
from dprobes.platform.linux.call_proxy import map_code
from dprobes.platform.linux.process_calls import note_end_of_thread
from dprobes.rpn.program_needs import takes_user_stacks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dprobes.engines.shared_globals import GlobalVariables
    from dprobes.native.routines.shared_hash_table import TableShape
    from dprobes.rpn.rpn_program import Program

__all__ = ["STATE_MAX", "Borrowed", "Clock", "HandlerMaps", "LifeMark", "new_state"]

# The clock of handlers in processes: what the time stamp counter means, as told by the tool (``native.process_page``).
#
# The tool looks at both clocks now and then, and corrects the rate: so handlers need no system call for the time. Where
# the kernel does not trust the counter, there is no such clock.


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


# A mark in shared memory that says whether this process lives: handlers do nothing any more when it does not.
#
# The kernel changes it, whichever way the process ends (``platform.linux.process_calls``): nobody has to write into it
# again and again, and handlers need no clock to know.


class LifeMark:
    """The mark in ``array``, which is that of a thread of its own; OSError if the kernel cannot do that."""

    def __init__(self, array: SharedArray) -> None:
        self._array = array
        self._address = array.own_address
        self._ready, self._over = threading.Event(), threading.Event()
        self._problem: OSError | None = None
        self._thread = threading.Thread(target=self._live, name="dprobes-life", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._problem is not None:
            self._over.set()
            self._thread.join()
            raise self._problem

    @property
    def address(self) -> int:
        """Where the probed process has it."""
        return self._array.place.address

    @property
    def word(self) -> int:
        """What it is now."""
        word: int = self._array.halves[0]
        return word

    def _live(self) -> None:
        try:
            note_end_of_thread(self._array.memory, self._address)
        except OSError as error:
            self._problem = error
        self._ready.set()
        self._over.wait()

    def close(self) -> None:
        """End it: handlers do nothing from now on."""
        self._over.set()
        self._thread.join()
        self._array.halves[0] = HAS_ENDED
        self._array.close()


# What handlers use that belongs to other programs as well: variables and tables of the principal, global variables.
#
# It is in files of its own, which the process maps besides that of the program.


_OWN = (MapName.PROBES,)
"""What each program has for itself of a state."""


@dataclass(frozen=True, slots=True)
class Borrowed:
    """The state of the ``principal``, and ``variables`` that all programs have."""

    principal: SharedState | None = None
    variables: GlobalVariables | None = None

    @property
    def files(self) -> tuple[tuple[int, int], ...]:
        """The files that a process has to map, (descriptor, size) each."""
        return () if self.principal is None else ((self.principal.region.descriptor, self.principal.region.size),)

    @property
    def globals_size(self) -> int:
        """The bytes of global variables that it has to map behind them."""
        return 0 if self.variables is None else mapped_size(self.variables.count)

    @property
    def parts(self) -> tuple[tuple[tuple[int, int], ...], int]:
        """Both."""
        return self.files, self.globals_size

    def places(self, addresses: Sequence[int]) -> Mapping[MapName, MapPlace]:
        """Return where a process has the maps that has mapped the files at these addresses."""
        left = list(addresses)
        found: dict[MapName, MapPlace] = {}
        if self.principal is not None:
            self.principal.region.place = left.pop(0)
            found |= {name: part.place for name, part in self.principal.maps.items() if name not in _OWN}
        if self.variables is not None:
            found[MapName.GLOBALS] = MapPlace(left.pop(0))
        return found


STATE_MAX = 1 << 19
"""Bytes that the state of a handler may take."""

_STATES = 256
"""How many threads can be in handlers, preempted or not: what nobody has used takes no memory."""
_RINGS_SIZE, _RING_SIZE_MIN = 8 << 20, 1 << 20
"""Bytes of all rings together, and of each at least: pages that nobody has used take no memory."""
_STACK_RINGS_SIZE = 64 << 20
"""The same for entries with copies of stacks, some thousands of bytes each, which take long to be followed."""
_SPARE = 1 << 20


def _rings(cpus: int, program: Program) -> RingShape:
    size = _STACK_RINGS_SIZE if takes_user_stacks(program) else _RINGS_SIZE
    return RingShape(cpus, max(size // cpus, _RING_SIZE_MIN))


def new_state(program: Program) -> SharedState:
    """Return the state of a program that is new, in memory with room for the rest of its maps."""
    sizes = HandlerMaps.sizes()
    rings = _rings(sizes.cpus, program)
    size = sizes.states * (STATE_MAX + 8) + rings.rings * rings.stride + _SPARE
    region = Region(size + SharedState.size_of(sizes.cpus, program))
    variables = program.vars, program.gvars, program.cvars, program.tvars
    return SharedState(region, sizes.cpus, variables, program.tables)


class HandlerMaps:
    """
    Own the maps of one program: its ``state``, and what only handlers in processes and readers of rings need.

    A probed process has the memory elsewhere than this one; ``places`` says where.
    """

    def __init__(self, state: SharedState, program: Program) -> None:
        self._state = state
        sizes, region = self.sizes(), state.region
        states, rings = sizes.states, _rings(sizes.cpus, program)
        self.region = region
        self.clock = Clock(region)
        self.rings = SharedRings(region, rings)
        self._arrays = {
            MapName.CLAIMS: SharedArray(region, 8, states),
            MapName.STATUS: SharedArray(region, STATUS_SIZE),
            MapName.SCRATCH: SharedArray(region, STATE_MAX, states),
            MapName.ZEROS: SharedArray(region, max(zeros_size(program.tables), 8 * power_of_two(program.tvars))),
        }
        self.life_mark = LifeMark(state.mark)  # the last, as it has a thread, which whatever fails above would leave

    @staticmethod
    def sizes() -> Tables:
        """Return the sizes of the maps that handlers are compiled for."""
        cpus = power_of_two(os.cpu_count() or 1)
        return Tables(states=_STATES, cpus=cpus, probes=PROBES_MAX)

    def places(self, address: int, borrowed: Borrowed, others: Sequence[int] = ()) -> Mapping[MapName, MapPlace]:
        """
        Return where a process has the maps that has the memory at an address.

        ``others`` are the addresses of what is ``borrowed``.
        """
        self.region.place = address
        places = {name: array.place for name, array in self._arrays.items()} | {MapName.RING: self.rings.place}
        places |= {name: part.place for name, part in self._state.maps.items()}
        return {**places, **borrowed.places(others)}

    @property
    def shapes(self) -> Mapping[MapName, TableShape]:
        """What the hashes look like."""
        return {name: part.shape for name, part in self._state.maps.items() if isinstance(part, SharedHash)}

    @property
    def held_words(self) -> Iterator[int]:
        """Where in the region those words are that are not 0 just now: while a handler has what they stand for."""
        hashes = (part.locks for part in self._state.maps.values() if isinstance(part, SharedHash))
        memory = self.region.mapping
        for places in (self._arrays[MapName.CLAIMS].elements, *hashes):
            yield from (place for place in places if memory[place])

    def disable(self, probe: int) -> None:
        """Let no handler of a probepoint run any more."""
        self._state.probes.words[(probe * PROBE_ENTRY_SIZE + ProbeField.DISABLED) // 8] = 1

    def close(self) -> None:
        """Let handlers do nothing any more, and give these maps up; the state stays, to be looked at."""
        with contextlib.ExitStack() as stack:
            for array in self._arrays.values():
                stack.callback(array.close)
            stack.callback(self.clock.close)
            stack.callback(self.rings.close)
            stack.callback(self.life_mark.close)  # the first of all
