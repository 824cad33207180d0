"""
The probepoints of USDT probes: one for each site in a file's notes of the probes that a definition names.

A site without an argument that the handler pushes is left out with the reason; it is an error if no site remains.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dprobes.arch.usdt_arguments import ARGUMENTS_MAX
from dprobes.diagnostics import either
from dprobes.errors import TargetError
from dprobes.resolve.probepoints import TAKEN, LeftOutProbe, ProbedCode, ProbeKind, Probepoint, ProbeState
from dprobes.rpn.program_needs import usdt_arguments
from dprobes.target.code.machine_code import Boundary, check_boundary, first_instructions
from dprobes.target.probed_module import NOT_EXPECTED
from dprobes.target.usdt import matching_sites, near_probes, usdt_sites

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from dprobes.diagnostics import Diagnostics
    from dprobes.rpn.rpn_program import Instruction, ProbeDefinition, Program, Usdt
    from dprobes.target.code.machine_code import DecodedInstruction
    from dprobes.target.probed_module import Module
    from dprobes.target.usdt import UsdtSite

__all__ = ["argument_symbols", "arguments_used", "resolve_usdt"]


def resolve_usdt(
    program: Program,
    number: int,
    module: Module,
    taken: Container[int],
    diagnostics: Diagnostics,
) -> tuple[list[Probepoint], list[LeftOutProbe]]:
    """
    Return the probepoints of a definition that names USDT probes, and the sites without one.

    ``taken`` are the file offsets of other probepoints.
    """
    return _Resolver(program, number, module, diagnostics).resolve(taken)


def arguments_used(program: Program, definition: ProbeDefinition) -> tuple[int, ...]:
    """Return the numbers of the arguments that a definition's handler pushes, in ascending order."""
    return tuple(sorted({int(str(each.operand)) for each in usdt_arguments(program, definition)}))


def argument_symbols(program: Program, module: Module, probes: Iterable[Probepoint]) -> dict[str, int]:
    """Return the link addresses of the symbols in the locations of arguments that handlers push."""
    found: dict[str, int] = {}
    for probe in probes:
        if probe.is_in_code and (site := probe.code.usdt) is not None and probe.state is ProbeState.COMPILED:
            for used in arguments_used(program, probe.definition):
                if used <= len(site.arguments) and (symbol := site.arguments[used - 1].symbol) and symbol not in found:
                    found[symbol] = module.address_of(symbol)
    return found


class _Resolver:
    def __init__(self, program: Program, number: int, module: Module, diagnostics: Diagnostics) -> None:
        self._number = number
        self._definition = program.definitions[number]
        location = self._definition.location
        self._location: Usdt = location  # type: ignore[assignment]  # the caller looks
        self._module = module
        self._path = str(module.path)
        self._diagnostics = diagnostics
        self._span = self._definition.span("offset")
        self._pushes = usdt_arguments(program, self._definition)

    def resolve(self, taken: Container[int]) -> tuple[list[Probepoint], list[LeftOutProbe]]:
        if not all(1 <= int(str(push.operand)) <= ARGUMENTS_MAX for push in self._pushes):
            return [], []  # the checker has reported it
        sites = matching_sites(self._module.elf, self._location.provider, self._location.name)
        if not sites:
            self._refuse_name()
            return [], []
        offsets = [site.offset for site in sites if site.offset is not None]
        decoded = dict(zip(offsets, first_instructions(self._module, offsets), strict=True))
        counts = Counter(site.probe for site in sites)
        probes: dict[int, Probepoint] = {}
        left_out: list[LeftOutProbe] = []
        is_taken = False
        for site in sites:
            where = self._where(site, is_alone=counts[site.probe] == 1)
            reason = self._reason_against(site, decoded)
            if reason is None and (site.offset in taken or site.offset in probes):
                reason, is_taken = TAKEN, True
            if reason is not None or site.offset is None:
                left_out.append(LeftOutProbe(self._number, self._path, where, reason or ""))
                continue
            probes[site.offset] = self._probepoint(site, decoded[site.offset], where)
        if not probes and not (is_taken and self._location.is_pattern):
            self._refuse_all(sites, left_out)
        elif left_out and not self._location.is_pattern:
            self._warn_of(left_out)
        return list(probes.values()), left_out

    def _warn_of(self, left_out: Sequence[LeftOutProbe]) -> None:
        more = f"; and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        self._diagnostics.warning(self._span, f"{left_out[0].name} is left out, because {left_out[0].reason}{more}")

    def _where(self, site: UsdtSite, *, is_alone: bool) -> str:
        """Return a site's name in messages: its probe's and, unless it ``is_alone``, also its place in the code."""
        if is_alone or site.offset is None:
            return f"usdt:{site.probe}"
        symbol = self._module.symbol_at(site.offset)
        return f"usdt:{site.probe} at " + (f"{symbol[0]}+{symbol[1]:#x}" if symbol is not None else f"{site.offset:#x}")

    def _reason_against(self, site: UsdtSite, decoded: dict[int, DecodedInstruction]) -> str | None:
        if site.offset is None:
            return "it is not in the code of the file"
        instruction, expected = decoded[site.offset], self._definition.opcode
        if not instruction.text.startswith("nop"):
            return f"there is no nop at it, but '{instruction.text}'"
        if self._module.is_known_code(site.offset):
            boundary = check_boundary(self._module, site.offset)
            if boundary.status is Boundary.INSIDE:
                return "it is inside another instruction"
        if expected is not None and expected != instruction.opcode_byte:
            return f"its opcode is not {expected:#04x}"
        return next(filter(None, (self._reason_against_argument(site, push) for push in self._pushes)), None)

    def _reason_against_argument(self, site: UsdtSite, push: Instruction) -> str | None:
        number = int(str(push.operand))
        if number > len(site.arguments):
            return f"it has {_counted(len(site.arguments), 'argument')}, and the handler pushes argument {number}"
        argument = site.arguments[number - 1]
        which = f"its argument {number} ('{argument.text}') cannot be pushed:"
        if argument.obstacle:
            return f"{which} {argument.obstacle}"
        if argument.symbol:
            try:
                self._module.address_of(argument.symbol)
            except TargetError as error:
                return f"{which} {error.message}"
        if argument.size > self._module.word_size:
            self._diagnostics.warning(
                push.span, f"argument {number} of 'usdt:{site.probe}' has 8 bytes: the lower 4 are pushed"
            )
        return None

    def _probepoint(self, site: UsdtSite, instruction: DecodedInstruction, where: str) -> Probepoint:
        difference = self._module.difference_at(instruction.offset) or ""
        if difference and difference != NOT_EXPECTED:
            self._diagnostics.warning(self._span, ProbeState.MISMATCH.line(f"{where}: {difference}"))
        else:
            difference = ""
        state = ProbeState.MISMATCH if difference else ProbeState.COMPILED
        code = ProbedCode(instruction, usdt=site)
        name = f"usdt:{site.probe}"
        return Probepoint(
            ProbeKind.BREAKPOINT, self._number, self._definition, self._path, where, code, state, name, difference
        )

    def _refuse_name(self) -> None:
        known = usdt_sites(self._module.elf)
        if not known:
            self._diagnostics.error(
                self._span,
                f"'{self._path}' has no USDT probes",
                hint="they may be in a library that it uses: 'dprobes list MODULE:usdt:*' shows those of a module",
            )
            return
        near = near_probes(self._module.elf, self._location.provider, self._location.name)
        providers = ", ".join(sorted({f"'{site.provider}'" for site in known}))
        hint = f"did you mean {either([f'usdt:{name}' for name in near])}?" if near else f"it has probes of {providers}"
        self._diagnostics.error(self._span, f"'{self._path}' has no USDT probe '{self._location}'", hint=hint)

    def _refuse_all(self, sites: Sequence[UsdtSite], left_out: Sequence[LeftOutProbe]) -> None:
        """
        Add the error that no site fits the handler.

        Its span is the argument's if all sites lack the same argument.
        """
        most = max(len(site.arguments) for site in sites)
        places = f"'{self._location}' has {_counted(len(sites), 'site')} in '{self._path}', with "
        for push in self._pushes:
            if int(str(push.operand)) > most:
                described = _counted(most, "argument") + (
                    " at most" if len({len(s.arguments) for s in sites}) > 1 else ""
                )
                self._diagnostics.error(
                    push.operand_place, f"argument {push.operand} does not exist: {places}{described}"
                )
                return
        more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        self._diagnostics.error(
            self._span,
            f"no site of '{self._location}' in '{self._path}' can carry this probe: "
            f"{left_out[0].name}{more}: {left_out[0].reason}",
        )


def _counted(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"
