"""A copy of a template is what the assembler makes for its address, site, number and trial."""

from __future__ import annotations

import random
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.bpf_instructions import Alu, Register, Size
from dprobes.bpf.map_layouts import MapName
from dprobes.diagnostics import Diagnostics
from dprobes.engines.inline.handler_hits import Borrowed, HandlerMaps, new_state
from dprobes.engines.inline.handler_pieces import NumberedCode, PieceWriter, SiteHandler
from dprobes.engines.inline.handler_templates import HandlerAssembler, may_vary
from dprobes.engines.inline.handler_trampolines import TrialCode
from dprobes.engines.inline.handler_trials import Trial, trial_of
from dprobes.engines.ptrace.client.site_answers import CompiledSite
from dprobes.native.generated_code import MapPlace, Part, ProcessFacts, Surroundings
from dprobes.native.handler_trampoline import make_trampoline
from dprobes.native.process_page import PROCESS_SIZE
from dprobes.native.runtime_routines import make_runtime
from dprobes.native.x86.x86_operations import X86Operations
from dprobes.record.log_record import Item
from dprobes.resolve.local_module import resolve
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.rpn.rpn_program import Point
from dprobes.source_text import SourceFile
from dprobes.target.probed_module import Module

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.rpn.rpn_program import Program

ADDRESS, PAGE, REGION = 0x7F12_3450_0000, 0x7F00_0000_0000, 0x7F00_1000_0000
FACTS = ProcessFacts(PAGE, PAGE + 4096, 720, life_mark=PAGE + 8192, first_stack=0x7FFF_0000_0000)
ROUNDS = 10

BODIES = {
    "a count": "inc lv, 0\nabort",
    "nothing": "abort",
    "a record": "push r, rdi\nlog 1\nexit",
    "the address": "push r, rip\npush r, rsp\nlog 2\nexit",
    "its data": "push d, 0x11223344\nlog 1\nexit",
    "a variable": "inc lv, 0\npush lv, 0\nlog 1\nexit",
}
RAWS = (
    "55",  # push rbp, without a trial
    "488b07", "488b4708", "488b87e8030000", "488b8798ffffff", "488b4f7f", "488b8f80000000",  # loads at rdi and more
    "48890f", "48894f08", "48898fe8030000", "48894f78", "48894f79", "48898f7c000000", "48894f80",  # stores
    "48890c25a0000000", "48890c2500100000",  # at fixed addresses
    "48890433", "4889443310", "6448890f", "64488b042528000000", "880437", "c6400c01",
    "f30f6f07", "660f6f00", "660f6f4010", "0f29442410", "8b0ccc", "8b4ccc08", "f3480f2cc1",
    "48f7f1", "48f73c24", "48f77708", "c3", "ffe1", "ff5008",
)  # fmt: skip
TRIALS = [trial_of(bytes.fromhex(raw)) for raw in RAWS]


@pytest.fixture(scope="module")
def program_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("templates")
    names = "".join(f"__attribute__((noipa)) long f{number}(long a) {{ return a; }}\n" for number in range(5))
    (directory / "a.c").write_text(f"{names}int main(void) {{ return 0; }}\n")
    path = directory / "templates"
    subprocess.run(["gcc", "-O2", "-o", path, directory / "a.c"], check=True)
    return path


def parsed(path: Path, body: str) -> Program:
    text = f'name = "{path}"\nvars = 1\nlogmax = 64\noffset = f*\n{body}\n'
    return parse_source(SourceFile("a.rpn", text), Diagnostics(), CompileOptions())


def learnt(path: Path, body: str) -> tuple[NumberedCode, Surroundings]:
    """Return the code that all probepoints have in common, and its surroundings in a process."""
    program = parsed(path, body)
    resolved = resolve(program, Module.load(path), Diagnostics())
    writer, codes = PieceWriter(program, Item.PID | Item.IP), []
    for number, probe in enumerate(resolved.probepoints):
        point = Point.of(program, probe.definition, probe.offset, probe.arguments)
        pieces = writer.pieces(number, probe, CompiledSite(resolved, point, (0, 0)))
        assert not isinstance(pieces, str), pieces
        codes.append(pieces[0].code)
    state = new_state(program)
    maps = HandlerMaps(state, program)
    try:
        places = dict(maps.places(REGION, Borrowed(None, None), ()))
    finally:
        maps.close()
    places[MapName.ENTRIES] = MapPlace(PAGE + PROCESS_SIZE)
    runtime = make_runtime(X86Operations(ADDRESS - (1 << 20)), FACTS, maps.rings.shape, maps.shapes)
    around = Surroundings(
        places, runtime.routines, runtime.map_routines, rings=maps.rings.shape, life_mark=FACTS.life_mark
    )
    return codes[-1], around


def assembled(
    address: int, site: int, handler: SiteHandler, around: Surroundings, trial: Trial | None, *, has_switches: bool
) -> tuple[bytes, list[object], list[object]]:
    """Return the code that the assembler makes for one place, with its stops and switches."""
    code = TrialCode(trial, site)
    parts = [Part(handler.assembled, around)]
    made = make_trampoline(X86Operations(address), site, parts, lambda _: None, code, has_switches=has_switches)
    return made.code, list(code.stops), list(made.switches)


@pytest.mark.parametrize("has_switches", [False, True])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_copies_are_what_the_assembler_makes(program_file: Path, body: str, has_switches: bool) -> None:
    code, around = learnt(program_file, body)
    assert code.places or body == "abort"
    numbers, found = random.Random(7), 0
    assembler = HandlerAssembler(around, has_switches=has_switches)
    for _ in range(ROUNDS):
        for trial in TRIALS:
            assert not isinstance(trial, str)
            number = numbers.choice((0, 1, 2, 127, 128, 129, 255, 256, 4000, numbers.randrange(1 << 16)))
            site = numbers.choice((0x401000, 0xFFFF_FFFF, 1 << 32, numbers.randrange(1 << 32, 1 << 47)))
            address = ADDRESS + numbers.randrange(1 << 24)
            handler = SiteHandler(code, number)
            made = assembler.copy_at(address, site, handler, trial)
            if made is None:
                continue
            found += 1
            expected = assembled(address, site, handler, around, trial, has_switches=has_switches)
            assert (bytes(made.code), made.stops, made.switches) == expected
    assert found > 0.9 * ROUNDS * len(TRIALS)


def test_displacements_of_accesses_are_fields(program_file: Path) -> None:
    code, around = learnt(program_file, "inc lv, 0\nabort")
    assembler, numbers = HandlerAssembler(around, has_switches=False), random.Random(3)
    assembler.copy_at(ADDRESS, 1 << 40, SiteHandler(code, 1), None)
    loads = [trial for trial in TRIALS if isinstance(trial, Trial) and trial.accesses]
    for trial in loads:
        for _ in range(30):
            distance = numbers.choice((0, 1, -1, 126, 127, 128, -127, -128, -129, -1000, 0x7FFF_0000, -(1 << 31)))
            moved = trial._replace(accesses=tuple(each._replace(displacement=distance) for each in trial.accesses))
            handler = SiteHandler(code, numbers.randrange(200, 4000))
            made = assembler.copy_at(ADDRESS, 1 << 40, handler, moved)
            if made is not None:
                expected = assembled(ADDRESS, 1 << 40, handler, around, moved, has_switches=False)
                assert (bytes(made.code), made.stops, made.switches) == expected
    assert len(assembler._pieces) < len(loads) + 2


def test_the_first_place_and_a_trial_that_refers_to_itself_have_no_template(program_file: Path) -> None:
    code, around = learnt(program_file, "inc lv, 0\nabort")
    assembler, handler = HandlerAssembler(around, has_switches=False), SiteHandler(code, 1)
    assert assembler.copy_at(ADDRESS, 1 << 40, handler, None) is None
    assert assembler.copy_at(ADDRESS, 1 << 40, handler, None) is not None
    relative = trial_of(bytes.fromhex("ff2500100000"))  # jmp [rip+0x1000]
    assert isinstance(relative, Trial)
    assert assembler.copy_at(ADDRESS, 1 << 40, handler, relative) is None
    assert assembler.copy_at(ADDRESS, 1 << 40, handler, Trial(b"", ends=3)) is None
    piece = assembler.piece_at(ADDRESS, ADDRESS - 4096, [handler], relative, lambda _: b"\x90")
    assert piece.code[:-1] == assembled(ADDRESS, ADDRESS - 4096, handler, around, relative, has_switches=False)[0]


def test_a_routine_that_is_too_far_is_an_error(program_file: Path) -> None:
    code, around = learnt(program_file, "push r, rdi\nlog 1\nexit")
    assembler, handler = HandlerAssembler(around, has_switches=False), SiteHandler(code, 1)
    if not any(insn.opcode == 0x85 for insn in code.assembled.code):
        pytest.fail("the handler calls nothing")
    assembler.copy_at(ADDRESS, 1 << 40, handler, None)
    with pytest.raises(OverflowError):
        assembler.copy_at(ADDRESS + (1 << 33), 1 << 40, handler, None)


def test_numbers_that_decide_what_the_code_is_do_not_vary() -> None:
    asm = Assembler()
    asm.mov(Register.R3, 40)
    asm.mov(Register.R2, Register.R10)
    asm.alu(Alu.ADD, Register.R2, -48)
    asm.mov(Register.R4, 5)
    asm.store(Register.R10, -8, 1, Size.DW)
    asm.exit()
    code = asm.assemble().code
    assert [may_vary(code, index) for index in range(5)] == [False, False, False, True, True]
