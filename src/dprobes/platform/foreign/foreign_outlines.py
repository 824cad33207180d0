"""
Outline of a foreign file as JSON: the examining process writes it, and its client checks it.

The client trusts no data from the file: each number has a range, each string and list has a maximum length, and
probepoints must be in code. The answer does not include the definitions and handlers of the probe program, because the
client has them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from dprobes.arch import architecture, go_architecture
from dprobes.arch.usdt_arguments import parse_arguments
from dprobes.diagnostics import Diagnostics
from dprobes.errors import TargetError
from dprobes.resolve.codeless_probes import resolve_samplers
from dprobes.resolve.local_module import encode_for
from dprobes.resolve.probepoints import (
    LeftOutProbe,
    ProbedCode,
    ProbeKind,
    Probepoint,
    ProbeState,
    ResolvedModule,
    WatchedMemory,
)
from dprobes.resolve.usdt_probes import arguments_used
from dprobes.rpn.program_checker import check
from dprobes.rpn.rpn_program import Usdt
from dprobes.target.code.function_exits import Exit, ExitKind, Exits
from dprobes.target.code.machine_code import MAX_LENGTH, first_instructions
from dprobes.target.elf.elf_headers import LoadSegment
from dprobes.target.module_outline import (
    Outline,
    OutlinedModule,
    first_executed_in,
    last_executed_in,
    return_address_user_in,
)
from dprobes.target.usdt import UsdtSite, is_semaphore

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dprobes.rpn.rpn_program import ProbeDefinition, Program
    from dprobes.target.code.machine_code import DecodedInstruction
    from dprobes.target.probed_module import Module, SymbolProvider

__all__ = ["ANSWER_MAX", "PROBES_MAX", "Examined", "Question", "read_answer", "write_answer"]

ANSWER_MAX = 16 << 20
"""Maximum size of an answer in bytes."""

PROBES_MAX = 1 << 14
"""Maximum number of probepoints in a file of another user."""

_LEFT_OUT_MAX = 1000
_TEXT_MAX = 1000  # characters
_SEGMENTS_MAX = 2048
_EXITS_MAX = 1 << 12
_STARTS_MAX = 8
_WORD = (1 << 64) - 1
_MACHINES: dict[str, Literal[4, 8]] = {"i386": 4, "x86_64": 8}


@dataclass(frozen=True, slots=True)
class Question:
    """
    Request to examine the file ``path``.

    The answer has an outline of the file and, if ``program`` is given, the program's probepoints. If ``soname`` is
    given, a file with another SONAME has no result. ``own_functions`` are functions at which the engine itself needs
    probepoints. If ``wants_moves`` is True, the answer has nearby instructions at which uprobes are cheaper.
    """

    path: str
    program: Program | None
    symbols: SymbolProvider
    allow_write: bool = False
    soname: str | None = None
    own_functions: tuple[str, ...] = ()
    wants_moves: bool = False


@dataclass(frozen=True, slots=True)
class Examined:
    """Result of examining a file: the module, the program's probepoints if one was given, and warnings as text."""

    module: OutlinedModule
    resolved: ResolvedModule | None
    warnings: str = ""


def write_answer(
    module: Module,
    resolved: ResolvedModule | None,
    *,
    moves: Mapping[int, int],
    own_places: Mapping[str, int],
) -> dict[str, Any]:
    """
    Return the answer about a file as a value for JSON; ``resolved`` is None if the question had no program.

    ``moves`` has the distances in bytes by which uprobes may be moved, by offset. ``own_places`` has the file offsets
    of the functions that the engine requested, by name.
    """
    elf = module.elf
    first, last = first_executed_in(module)[:_STARTS_MAX], last_executed_in(module)[:_STARTS_MAX]
    probes = resolved.in_code if resolved is not None else ()
    if len(probes) > PROBES_MAX:
        raise TargetError(f"the program has {len(probes)} places in it, more than the {PROBES_MAX} that are probed")
    places = {elf.file_offset(address) for address in (*first, *last)} | set(own_places.values())
    for probe in probes:
        places |= {probe.offset, probe.offset + moves.get(probe.offset, 0)}
        places.update(leaving.offset for leaving in probe.code.exits.exits)
    code = {place: _code_at(module, place) for place in places if place is not None}
    answer: dict[str, Any] = {
        "size": len(elf.data),
        "machine": elf.machine,
        "type": elf.type,
        "entry": elf.entry,
        "build_id": elf.build_id,
        "soname": None if elf.soname is None else _shortened(elf.soname),
        "segments": [[s.vaddr, s.memsz, s.offset, s.filesz, s.flags] for s in elf.load_segments],
        "pieces": [[place, piece.hex()] for place, piece in code.items() if piece],
        "first": list(first),
        "last": list(last),
        "own": sorted(own_places.items()),
        "user": None,
        "starts": [],
        "moves": [],
    }
    if resolved is not None:
        answer |= _resolution(module, resolved)
        answer["moves"] = sorted(moves.items())
    return answer


def _resolution(module: Module, resolved: ResolvedModule) -> dict[str, Any]:
    probes = resolved.in_code
    leaves_by_jump = any(leaving.kind is not ExitKind.RETURN for probe in probes for leaving in probe.code.exits.exits)
    left_out = [[left.number, _shortened(left.name), _shortened(left.reason)] for left in resolved.left_out]
    if len(left_out) > _LEFT_OUT_MAX:
        more = len(left_out) - _LEFT_OUT_MAX
        left_out[_LEFT_OUT_MAX:] = [[left_out[-1][0], f"{more} more", "they are too many to be listed"]]
    return {
        "user": return_address_user_in(module) if leaves_by_jump else None,
        "starts": [p.offset for p in probes if module.function_start(p.offset) == p.instruction.address],
        "probes": [
            [p.number, p.offset, _shortened(p.where), p.state.value, _shortened(p.function), _shortened(p.detail),
             _exits(p.code.exits) if p.at_return else None, _usdt(p.code.usdt)]
            for p in probes
        ],
        "symbols": [[name, address] for name, address in resolved.symbols],
        "go": resolved.architecture.convention == "Go",
        "of_c": sorted(resolved.of_c),
        "left_out": left_out,
        "watchpoints": [
            [w.number, w.memory.address, w.memory.length, w.memory.absolute, _shortened(w.where), w.state.value]
            for w in resolved.of(ProbeKind.WATCHPOINT)
        ],
        "warnings": _shortened("\n".join(warning.render() for warning in resolved.warnings), 8 * _TEXT_MAX),
    }  # fmt: skip


def _usdt(site: UsdtSite | None) -> list[Any] | None:
    """Return a USDT probe's site as a JSON value; None for None."""
    if site is None:
        return None
    return [site.provider, site.name, site.semaphore, site.counter, _shortened(site.described)]


def _exits(exits: Exits) -> list[Any]:
    return [[[e.kind.value, e.address, e.offset, e.raw.hex()] for e in exits.exits], [list(r) for r in exits.ranges]]


def _shortened(text: str, limit: int = _TEXT_MAX) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _code_at(module: Module, offset: int) -> bytes:
    """Return the bytes of the instruction at a file offset, or no bytes if there is none."""
    try:
        return next(first_instructions(module, (offset,))).raw
    except TargetError:
        return b""


def read_answer(data: bytes, question: Question) -> Examined | None:
    """
    Check and return the result in an answer; return None if the file's SONAME is not the one in the question.

    Raise ``TargetError`` if the answer is invalid. Also raise the errors that the examining process found in the file
    or in the program.
    """
    reader = _Reader(question)
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        reader.refuse()
    return reader.read(answer)


class _Reader:
    """Reader of an untrusted answer in JSON. It raises ``TargetError`` if a part of the answer is invalid."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._path = Path(question.path)

    def refuse(self) -> NoReturn:
        raise TargetError(f"'{self._path}' is not probed: its contents are not valid")

    def read(self, answer: Any) -> Examined | None:
        if not isinstance(answer, dict):
            self.refuse()
        if "error" in answer:
            self._raise(answer)
        if answer.get("meant") is False:
            return None
        outline = self._outline(answer)
        module = OutlinedModule(self._path, outline)
        if any(not module.elf.is_executable_offset(place) for place in outline.pieces):
            self.refuse()
        if "probes" not in answer or (program := self._question.program) is None:
            return Examined(module, None)
        return Examined(module, self._resolved(answer, module, program), self._text(answer["warnings"], 8))

    def _raise(self, answer: dict[str, Any]) -> NoReturn:
        from dprobes.errors import SourceError

        message = self._text(answer.get("error"), 8)
        hint = answer.get("hint")
        if answer.get("kind") == "source":
            raise SourceError.rendered(message)
        raise TargetError(message, hint=None if hint is None else self._text(hint))

    # Parts

    def _outline(self, answer: dict[str, Any]) -> Outline:
        try:
            machine = self._text(answer["machine"])
            if machine not in _MACHINES:
                self.refuse()
            build_id, soname, user = answer["build_id"], answer["soname"], answer["user"]
            return Outline(
                size=self._number(answer["size"]),
                word_size=_MACHINES[machine],
                machine=machine,
                type=self._text(answer["type"]),
                entry=self._number(answer["entry"]),
                build_id=None if build_id is None else bytes.fromhex(self._text(build_id)).hex(),
                soname=None if soname is None else self._text(soname),
                segments=tuple(
                    LoadSegment(*map(self._number, fields))
                    for fields in self._rows(answer["segments"], 5, _SEGMENTS_MAX)
                ),
                pieces=dict(self._pieces(answer["pieces"])),
                starts=frozenset(map(self._number, self._list(answer["starts"], PROBES_MAX))),
                moves={
                    self._number(offset): self._number(moved, MAX_LENGTH * MAX_LENGTH)
                    for offset, moved in self._rows(answer["moves"], 2, PROBES_MAX)
                },
                first_executed=tuple(map(self._number, self._list(answer["first"], _STARTS_MAX))),
                last_executed=tuple(map(self._number, self._list(answer["last"], _STARTS_MAX))),
                return_address_user=None if user is None else self._text(user),
                own_places={
                    self._text(name): self._number(place)
                    for name, place in self._rows(answer["own"], 2, len(self._question.own_functions))
                },
            )
        except (KeyError, ValueError):
            self.refuse()

    def _pieces(self, value: Any) -> Iterator[tuple[int, bytes]]:
        for offset, text in self._rows(value, 2, PROBES_MAX * 8):
            piece = self._bytes(text)
            if not piece:
                self.refuse()
            yield self._number(offset), piece

    def _resolved(self, answer: dict[str, Any], module: OutlinedModule, program: Program) -> ResolvedModule:
        arch = architecture(module.elf.machine)
        if answer["go"] is True and arch.name == "x86_64":
            arch = go_architecture()
        last = len(program.definitions) - 1
        of_c = frozenset(self._number(each, last) for each in self._list(answer["of_c"], last + 1))
        diagnostics = Diagnostics()
        check(program, arch, diagnostics, allow_write=self._question.allow_write)
        diagnostics.raise_if_errors()
        try:
            return ResolvedModule(
                module,
                arch,
                encode_for(program, arch, of_c),
                (
                    *self._in_code(answer["probes"], module, program),
                    *self._watchpoints(answer["watchpoints"], program),
                    *resolve_samplers(program, str(self._path)),
                ),
                tuple(
                    (self._text(name), self._number(address))
                    for name, address in self._rows(answer["symbols"], 2, _TEXT_MAX)
                ),
                tuple(self._left_out(answer["left_out"], program)),
                of_c=of_c,
            )
        except (KeyError, ValueError):
            self.refuse()

    def _in_code(self, value: Any, module: OutlinedModule, program: Program) -> Iterator[Probepoint]:
        rows = self._rows(value, 8, PROBES_MAX)
        places = [self._number(row[1]) for row in rows]
        if any(place not in module.outline.pieces for place in places):
            self.refuse()
        found: Sequence[DecodedInstruction] = list(first_instructions(module, places))
        for row, instruction in zip(rows, found, strict=True):
            number, _, where, state, function, detail, exits, usdt = row
            definition = program.definitions[self._number(number, len(program.definitions) - 1)]
            if definition.at_return != (exits is not None):
                self.refuse()
            if isinstance(definition.location, Usdt) != (usdt is not None):
                self.refuse()
            if exits is not None:
                code = ProbedCode(instruction, self._exits(exits, module))
            else:
                code = ProbedCode(instruction, usdt=self._usdt(usdt, definition, program, instruction, module))
            yield Probepoint(
                ProbeKind.BREAKPOINT if exits is None else ProbeKind.RETURN,
                number,
                definition,
                str(self._path),
                self._text(where),
                code,
                ProbeState(self._text(state)),
                self._text(function),
                self._text(detail),
            )

    def _usdt(
        self,
        value: Any,
        definition: ProbeDefinition,
        program: Program,
        instruction: DecodedInstruction,
        module: OutlinedModule,
    ) -> UsdtSite | None:
        if value is None:
            return None
        ((provider, name, semaphore, counter, described),) = self._rows([value], 5, 1)
        arguments = parse_arguments(self._text(described), architecture(module.elf.machine))
        if any(n > len(arguments) or arguments[n - 1].obstacle for n in arguments_used(program, definition)):
            self.refuse()
        if semaphore and not is_semaphore(module.elf, self._number(semaphore)):
            self.refuse()
        return UsdtSite(
            self._text(provider),
            self._text(name),
            instruction.address,
            instruction.offset,
            self._number(semaphore),
            self._number(counter),
            arguments,
            described,
        )

    def _exits(self, value: Any, module: OutlinedModule) -> Exits:
        if not isinstance(value, list) or len(value) != 2:
            self.refuse()
        exits = []
        for kind, address, offset, text in self._rows(value[0], 4, _EXITS_MAX):
            raw = self._bytes(text)
            if module.outline.pieces.get(self._number(offset), b"") != raw:
                self.refuse()
            exits.append(Exit(ExitKind(self._text(kind)), self._number(address), offset, raw))
        ranges = [(self._number(start), self._number(end)) for start, end in self._rows(value[1], 2, _EXITS_MAX)]
        return Exits(tuple(exits), tuple(ranges))

    def _left_out(self, value: Any, program: Program) -> Iterator[LeftOutProbe]:
        for number, name, reason in self._rows(value, 3, _LEFT_OUT_MAX + 1):
            place = self._number(number, len(program.definitions) - 1)
            yield LeftOutProbe(place, str(self._path), self._text(name), self._text(reason))

    def _watchpoints(self, value: Any, program: Program) -> Iterator[Probepoint]:
        for number, address, length, absolute, where, state in self._rows(value, 6, len(program.definitions)):
            definition = program.definitions[self._number(number, len(program.definitions) - 1)]
            if definition.watchpoint is None or not isinstance(absolute, bool):
                self.refuse()
            yield Probepoint(
                ProbeKind.WATCHPOINT,
                number,
                definition,
                str(self._path),
                self._text(where),
                WatchedMemory(self._number(address), self._number(length), absolute, definition.watchpoint),
                ProbeState(self._text(state)),
            )

    # Values

    def _number(self, value: Any, highest: int = _WORD) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= highest:
            self.refuse()
        return value

    def _text(self, value: Any, limits: int = 1) -> str:
        if not isinstance(value, str) or len(value) > limits * _TEXT_MAX:
            self.refuse()
        return value

    def _bytes(self, value: Any) -> bytes:
        text = self._text(value)
        if len(text) > 2 * MAX_LENGTH:
            self.refuse()
        return bytes.fromhex(text)

    def _list(self, value: Any, limit: int) -> list[Any]:
        if not isinstance(value, list) or len(value) > limit:
            self.refuse()
        return value

    def _rows(self, value: Any, width: int, limit: int) -> list[list[Any]]:
        rows = self._list(value, limit)
        if any(not isinstance(row, list) or len(row) != width for row in rows):
            self.refuse()
        return rows
