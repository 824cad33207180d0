"""
Sites of the probepoints of a file: the instructions at which uprobes are placed.

Instructions that uprobes do not support are found by decoding, before anything is loaded, because the kernel would not
report them if the file is mapped later. This module uses files only.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from dprobes.bpf.lower.lowering_request import Placement
from dprobes.resolve.breakpoints import movable_probes
from dprobes.resolve.probepoints import LeftOutProbe, ProbeState
from dprobes.rpn.program_needs import entry_registers
from dprobes.target.code.function_exits import ExitKind
from dprobes.target.code.machine_code import decode_at
from dprobes.target.code.uprobe_sites import may_fault, refusal, uprobe_class
from dprobes.target.module_outline import cheap_sites_in

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    from dprobes.bpf.lower.lowering_request import PortFilter
    from dprobes.diagnostics import Diagnostics
    from dprobes.resolve.probepoints import Probepoint, ResolvedModule
    from dprobes.rpn.rpn_program import Program

__all__ = ["DEBUG_REGISTER", "FilePlan", "Site", "plan_file"]

DEBUG_REGISTER = "debug register"
"""Cause of a watchpoint's hits in the summary."""


class Site(NamedTuple):
    """
    Place of one uprobe or kprobe.

    * ``offset`` is the file offset, or the address in the kernel. ``moved`` is its distance in bytes from the place
      that the probepoint specifies.
    * ``return_bytes`` is the immediate of the return instruction at a RET_SITE: the number of bytes of arguments that
      it pops after the return address.
    * ``executed`` describes for users how the kernel executes the instruction.
    * ``may_fault`` is True if the instruction may raise a signal.
    * ``counter`` is the file offset of the semaphore of a USDT probe, or 0.
    * ``anchor`` is ``SYMBOL+DISTANCE``, by which the kernel finds the place whenever its module is loaded, or empty.
    * ``arguments`` is the number of words that the function at a trampoline has in registers.
    * ``ports`` are the ports for which the executions of a port instruction are hits, or None for all ports.
    """

    offset: int
    placement: Placement
    executed: str
    may_fault: bool
    moved: int = 0
    return_bytes: int = 0
    anchor: str = ""
    arguments: int = 0
    counter: int = 0
    ports: PortFilter | None = None
    is_entry: bool = False
    """True if the BPF program at this place keeps the entry of a call for the handler of its return."""


class FilePlan(NamedTuple):
    """
    Probepoints of a file, each with its sites, and those that are left out.

    If a probepoint has no sites, its ``state`` shows the reason.
    """

    resolved: ResolvedModule
    probes: tuple[tuple[Probepoint, tuple[Site, ...]], ...]
    left_out: tuple[LeftOutProbe, ...]


_HANDS_OVER = "it may hand over to another function, and a uretprobe"


def plan_file(
    program: Program,
    resolved: ResolvedModule,
    diagnostics: Diagnostics,
    *,
    exact: bool,
    uretprobe_hazard: Callable[[], str | None],
    kept: Container[int] = (),
) -> FilePlan:
    """
    Return the sites of a file's probepoints; add errors to ``diagnostics``.

    If the program names an unsupported place, this is an error; if a pattern matches it, the place is left out.
    ``exact`` forbids moving uprobes to a neighboring instruction; those at the file offsets ``kept`` are never moved.
    ``uretprobe_hazard`` returns the reason against uretprobes in the file, or None. It is called only if the program
    has probepoints at returns.
    """
    planner = _Planner(program, resolved, diagnostics, exact=exact, kept=kept, uretprobe_hazard=cache(uretprobe_hazard))
    found = FilePlan(resolved, tuple(planner.probes()), (*resolved.left_out, *planner.left_out))
    diagnostics.raise_if_errors()
    return found


class _Planner:
    def __init__(
        self,
        program: Program,
        resolved: ResolvedModule,
        diagnostics: Diagnostics,
        *,
        exact: bool,
        kept: Container[int],
        uretprobe_hazard: Callable[[], str | None],
    ) -> None:
        self._kept = kept
        self._uretprobe_hazard = uretprobe_hazard
        self._program = program
        self._resolved = resolved
        self._diagnostics = diagnostics
        self._bits = 8 * resolved.architecture.word_size
        self._moves = {} if exact else self._cheaper_places()
        self.left_out: list[LeftOutProbe] = []

    def probes(self) -> Iterator[tuple[Probepoint, tuple[Site, ...]]]:
        for probe in self._resolved.in_code:
            if probe.state is not ProbeState.COMPILED or probe.never_returns:
                yield probe, ()
                continue
            sites = self._sites(probe)
            if sites:
                moved = sites[0].moved if sites[0].placement is Placement.BREAKPOINT else 0
                yield probe._replace(subject=probe.code._replace(moved=moved)) if moved else probe, sites

    def _sites(self, probe: Probepoint) -> tuple[Site, ...]:
        """
        Return the sites of a probepoint.

        If it is unsupported, add an error or a left-out entry, and return no site.
        """
        if probe.at_return:
            return self._exits(probe)
        reason = refusal(probe.instruction, self._bits, at_entry=self._is_entry(probe))
        if reason is not None:
            self._refuse(probe, f"its instruction is '{probe.instruction.text}': {reason}")
            return ()
        moved = self._moves.get(probe.offset, 0)
        raw = decode_at(self._resolved.module, probe.offset + moved).raw if moved else probe.instruction.raw
        executed = uprobe_class(raw, self._bits).value
        faults = may_fault(raw, self._bits)
        usdt = probe.code.usdt
        if usdt is not None and usdt.semaphore and not usdt.counter:
            self._refuse(probe, "its semaphore is not in the file, so the kernel cannot raise it")
            return ()
        counter = usdt.counter if usdt is not None else 0
        return (Site(probe.offset + moved, Placement.BREAKPOINT, executed, faults, moved, counter=counter),)

    def _cheaper_places(self) -> dict[int, int]:
        """Return the distances in bytes by which uprobes are moved, keyed by the file offset of the specified place."""
        probes = [probe for probe in movable_probes(self._resolved) if probe.offset not in self._kept]
        moves = cheap_sites_in(self._resolved.module, [probe.instruction for probe in probes])
        return {probe.offset: moved for probe, moved in zip(probes, moves, strict=True) if moved}

    def _is_entry(self, probe: Probepoint) -> bool:
        return self._resolved.module.function_start(probe.offset) == probe.instruction.address

    def _exits(self, probe: Probepoint) -> tuple[Site, ...]:
        exits = self._plain_exits(probe)
        if not exits or entry_registers(self._program, probe.definition, self._resolved.architecture) is None:
            return exits
        raw = probe.instruction.raw
        if self._bits == 32 and exits[0].placement is Placement.URETPROBE:
            self._refuse(probe, f"{_HANDS_OVER} does not show in 32-bit code which call returns")
        elif (reason := refusal(probe.instruction, self._bits, at_entry=True)) is not None:
            self._refuse(probe, f"its entry is kept at its first instruction '{probe.instruction.text}': {reason}")
        elif any(site.offset == probe.offset and site.placement is Placement.RET_SITE for site in exits):
            self._refuse(probe, "it returns by its first instruction, where its entry is to be kept as well")
        else:
            executed = uprobe_class(raw, self._bits).value
            return (Site(probe.offset, Placement.BREAKPOINT, executed, may_fault=False, is_entry=True), *exits)
        return ()

    def _plain_exits(self, probe: Probepoint) -> tuple[Site, ...]:
        exits = probe.code.exits.exits
        if any(leaving.kind is not ExitKind.RETURN for leaving in exits):
            another = _HANDS_OVER
            if (hazard := self._uretprobe_hazard()) is not None:
                self._refuse(probe, f"{another} would do harm: {hazard}")
                return ()
            if (reason := refusal(probe.instruction, self._bits, at_entry=True)) is not None:
                self._refuse(
                    probe, f"{another} cannot be put on its first instruction '{probe.instruction.text}': {reason}"
                )
                return ()
            return (Site(probe.offset, Placement.URETPROBE, "return address", may_fault=False),)
        for leaving in exits:
            instruction = decode_at(self._resolved.module, leaving.offset)
            if (reason := refusal(instruction, self._bits)) is not None:
                self._refuse(probe, f"it returns by '{instruction.text}': {reason}")
                return ()
        return tuple(
            Site(
                leaving.offset,
                Placement.RET_SITE,
                uprobe_class(leaving.raw, self._bits).value,
                may_fault=True,
                moved=leaving.offset - probe.offset,
                return_bytes=int.from_bytes(leaving.raw[-2:], "little") if leaving.raw[-3:-2] == b"\xc2" else 0,
            )
            for leaving in exits
        )

    def _refuse(self, probe: Probepoint, reason: str) -> None:
        definition = probe.definition
        if definition.has_many_places:
            self.left_out.append(LeftOutProbe(probe.number, probe.path, probe.where, reason))
            return
        what = f"the return of {probe.where}" if probe.at_return else probe.where
        self._diagnostics.error(
            definition.span("offset"),
            f"the ebpf engine cannot probe {what}: {reason}",
            hint="use --engine ptrace with -c COMMAND or -p PID",
        )
