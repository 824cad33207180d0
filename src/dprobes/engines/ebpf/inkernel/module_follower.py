"""
Loading and unloading of a kernel module while a program probes it.

The kernel itself registers kprobes when it loads the module (``waiting_kprobes``). Watchpoints and samplers need
addresses, so they are attached when ``look`` finds the module loaded, after its first instructions were executed.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.diagnostics import Diagnostics
from dprobes.engines.ebpf.attach.perf_probes import events_in_kernel
from dprobes.engines.engine_interface import Notice, StateEvent
from dprobes.errors import DprobesError
from dprobes.platform.linux.kernel_events import KernelEvents
from dprobes.resolve.codeless_probes import resolve_samplers, resolve_watchpoints
from dprobes.resolve.kernel_places import KernelModule
from dprobes.resolve.probepoints import ProbeState, pushed_symbols
from dprobes.target.kernel.running_kernel import RunningKernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.ebpf.attach.installation import Installation
    from dprobes.engines.engine_interface import Event
    from dprobes.resolve.kernel_places import ResolvedKernel
    from dprobes.rpn.rpn_program import Program

__all__ = ["ModuleFollower"]

_MODULES = Path("/sys/module")
_REGISTERED = Path("/sys/kernel/debug/kprobes/list")
_LANDING_PAD = 4
"""Size in bytes of an ``endbr64``. At the start of a function, the kernel places a probe after it."""

_NOT_REGISTERED = "the kernel has not taken the probepoint; its log (dmesg) may say why"


class ModuleFollower:
    """Follower of one kernel module in which a program has probepoints. Call ``look`` often."""

    def __init__(self, program: Program, resolved: ResolvedKernel, installed: Installation) -> None:
        self._program = program
        self._resolved = resolved
        self._installed = installed
        self._name = resolved.module.name
        self._events: KernelEvents | None = None
        with contextlib.suppress(OSError):
            self._events = KernelEvents()
        # A module that has been loaded meanwhile is found by the first ``look``.
        self._identity = self._look_up() if resolved.module.is_loaded else None
        self.is_there = self._identity is not None
        """True if the module was loaded at the last ``look``."""

    @property
    def descriptor(self) -> int:
        """Descriptor that is readable when ``look`` should be called; -1 if there is none."""
        return -1 if self._events is None else self._events.descriptor

    def begin(self) -> Iterator[Event]:
        """Iterate over the events at the start; call this after everything is attached."""
        if self.is_there:
            return
        yield from self._absent()
        waiting = len(self._mine())
        what = "its probepoint becomes" if waiting == 1 else f"its {waiting} probepoints become"
        yield Notice(f"the module '{self._name}' is not loaded: {what} active when it is", is_warning=False)

    def look(self) -> Iterator[Event]:
        """Iterate over the events of the module since the last call."""
        if self._events is not None:
            self._events.drain()
        found = self._look_up()
        if found == self._identity:
            return
        before, self._identity = self._identity, found
        if before is not None:
            self.is_there = False
            message = f"the module '{self._name}' has been unloaded"
            ended = self._give_up()
            if ended:
                lost = "1 probepoint depends" if len(ended) == 1 else f"{len(ended)} probepoints depend"
                message += f": {lost} on addresses in it, and will not come back"
            if mine := self._mine():
                others = "the other waits" if len(mine) == 1 else "the others wait"
                message += f"; {others}" if ended else ": its probepoints wait"
                message += " until it is loaded again"
            # The reason comes before its consequence: the run may be over with its last probepoint.
            yield Notice(message, is_warning=False)
            if ended:
                yield StateEvent(ended, 0, ProbeState.REMOVED, f"the module '{self._name}' has been unloaded")
            yield from self._absent()
        if found is not None:
            self.is_there = True
            yield Notice(f"the module '{self._name}' has been loaded: it is probed", is_warning=False)
            yield from self._present()

    def close(self) -> None:
        """Close the events that report the loading and unloading of the module."""
        if self._events is not None:
            self._events.close()

    def _look_up(self) -> int | None:
        """Return a number that identifies the module while it is loaded, or None if it is not loaded."""
        # The module's directory exists from before its init is called until after its end (mod_sysfs_setup). No other
        # module's directory gets the same inode number.
        try:
            return os.stat(_MODULES / self._name).st_ino
        except OSError:
            return None

    def _mine(self) -> list[int]:
        """Return the numbers of the probepoints in the module that have not ended."""
        ended = self._installed.attachments.has_ended
        return [number for number, sites in self._installed.numbers.sites.items() if sites and not ended(number)]

    def _give_up(self) -> tuple[int, ...]:
        """
        Detach the perf events of an unloaded module, and end the probepoints that cannot be attached again.

        Return the numbers of these.
        """
        attachments, numbers = self._installed.attachments, self._installed.numbers
        for number in numbers.events:
            attachments.detach(number)
        ended = [
            number
            for number in self._mine()
            if number not in numbers.events and not all(site.anchor for site in numbers.sites[number])
        ]
        return tuple(number for number in ended if attachments.take_away(number))

    def _absent(self) -> Iterator[Event]:
        if mine := tuple(self._mine()):
            yield StateEvent(mine, 0, ProbeState.COMPILED, f"the module '{self._name}' is not loaded")

    def _present(self) -> Iterator[Event]:
        """Attach the perf events of the loaded module; iterate over the states of active and failed probepoints."""
        kernel = RunningKernel()
        problems: list[StateEvent] = []
        try:
            problems += self._attach_events(KernelModule(kernel, self._name))
            problems += self._not_registered(kernel)
        except DprobesError as error:
            yield Notice(f"not all of the module '{self._name}' is probed: {error.message}", error.hint)
        absent = {number for event in problems for number in event.probes}
        if active := tuple(number for number in self._mine() if number not in absent):
            yield StateEvent(active, 0, ProbeState.ACTIVE)
        yield from problems

    def _attach_events(self, module: KernelModule) -> list[StateEvent]:
        """Attach watchpoints and samplers at the module's current addresses; return the states of those that fail."""
        numbers = self._installed.numbers
        mine = [number for number in self._mine() if number in numbers.events]
        if not mine:
            return []
        module.check()
        diagnostics = Diagnostics()
        probes = (
            *resolve_watchpoints(self._program, module, diagnostics),
            *resolve_samplers(self._program, str(module.path)),
        )
        symbols = pushed_symbols(self._program, module.address_of, diagnostics)
        diagnostics.raise_if_errors()
        resolved = replace(self._resolved, module=module, probepoints=probes, symbols=symbols)
        found = {event.probe.number: event for event in events_in_kernel(resolved)}
        for number in mine:
            numbers.renew_event(number, found[numbers.probes[number].number])
        return self._installed.attach_events(mine)

    def _not_registered(self, kernel: RunningKernel) -> list[StateEvent]:
        """
        Return the states of probepoints that the kernel refused to register.

        Its list of kprobes lacks them.
        """
        try:
            lines = _REGISTERED.read_text(errors="replace").splitlines()
        except OSError:
            return []
        there = {int(match[1], 16) for match in (re.match(r"([0-9a-f]+)  [kr]", line) for line in lines) if match}
        addresses = {symbol.name: symbol.address for symbol in kernel.symbols.matching("*", self._name)}
        found: list[StateEvent] = []
        for number in self._mine():
            for site in self._installed.numbers.sites[number]:
                name, _, distance = site.anchor.rpartition("+")
                # Symbols without an address are in init code, which the kernel has freed.
                if name in addresses:
                    address = addresses[name] + int(distance)
                    if there.isdisjoint((address, address + _LANDING_PAD)):
                        found.append(StateEvent((number,), 0, ProbeState.EXCLUDED, _NOT_REGISTERED))
        return found
