"""
What the running kernel does with instructions that carry a uprobe is what ``target.uprobes`` says.

Files full of instructions are mapped by a program with uprobes on all of them: those that the kernel takes hold a
breakpoint then. The instruction forms of ``tests/forms`` run with uprobes, each in a process of its own, which says
whether the kernel has made it the page for stepping.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ebpf.kernel.bpf_objects import ArrayMap
from dprobes.platform.linux.bpf_calls import AttachType, Program, ProgramType, link_uprobes, load_program
from dprobes.target.code.machine_code import decode_at
from dprobes.target.code.uprobe_sites import UprobeClass, has_no_effect, refusal, uprobe_class
from dprobes.target.probed_module import Module
from integration.ebpf.kernel import insn, load_map, require_bpf
from integration.form_programs import VARIANTS, processor_flags
from integration.support import TIMEOUT, Builder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dprobes.target.code.machine_code import DecodedInstruction
    from support.form_table import Form

GET_ATTACH_COOKIE, MAP_LOOKUP_ELEM = 174, 1
SLOT = 16  # bytes from one instruction of a made-up file to the next
BREAKPOINT = 0xCC
VARIANT_NAMES = {64: "x86_64", 32: "i386"}


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()


@contextlib.contextmanager
def uprobes(path: Path, offsets: Sequence[int]) -> Iterator[ArrayMap]:
    """Put uprobes on the file; give the array that counts the hits of each."""
    with ArrayMap(8, len(offsets)) as counts:
        count_hit = (
            insn(0x85, value=GET_ATTACH_COOKIE)
            + insn(0x63, 10, 0, -4)
            + load_map(1, counts.fd)
            + insn(0xBF, 2, 10)
            + insn(0x07, 2, value=-4)
            + insn(0x85, value=MAP_LOOKUP_ELEM)
            + insn(0x15, 0, offset=2)
            + insn(0xB7, 1, value=1)
            + insn(0xDB, 0, 1)
            + insn(0xB7, 0)
            + insn(0x95)
        )
        program = load_program(Program(ProgramType.KPROBE, count_hit, AttachType.TRACE_UPROBE_MULTI))
        try:
            link = link_uprobes(program, str(path), offsets, range(len(offsets)))
        except OSError as error:
            os.close(program)
            pytest.skip(f"the kernel has no uprobe_multi links: {error}")
        try:
            yield counts
        finally:
            os.close(link)
            os.close(program)


def accepted(build: Builder, directory: Path, instructions: Sequence[bytes], bits: int) -> list[bool]:
    """Return on which of the instructions the kernel puts a breakpoint in a program of that word size."""
    path = directory / f"code{bits}"
    path.write_bytes(b"".join(raw.ljust(SLOT, b"\x90") for raw in instructions))
    mapper = build("mapfile.c", "-D_FILE_OFFSET_BITS=64", i386=bits == 32)
    with uprobes(path, range(0, SLOT * len(instructions), SLOT)):
        process = subprocess.Popen([mapper, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            start = int(process.stdout.readline(), 16)
            with Path(f"/proc/{process.pid}/mem").open("rb") as memory:
                memory.seek(start)
                shown = memory.read(SLOT * len(instructions))
        finally:
            process.stdin.close()
            process.stdout.close()
            process.wait(TIMEOUT)
    return [shown[n * SLOT] == BREAKPOINT for n in range(len(instructions))]


def heads(bits: int) -> Iterator[bytes]:
    """Give what can come before an instruction's last opcode byte: prefixes and the bytes that choose a map."""
    legacy = ("", "66", "f2", "f3", "67", "2e", "26", "36", "3e", "64", "65", "f0")
    rex = ("48", "41", "6648", "f348") if bits == 64 else ()
    for prefixes, legacy_map in itertools.product((*legacy, *rex), ("", "0f", "0f38", "0f3a")):
        yield bytes.fromhex(prefixes + legacy_map)
    for p, length in itertools.product(range(4), (0, 4)):
        yield bytes([0xC5, 0xF8 | p | length])
        for opcode_map, w in itertools.product((1, 2, 3), (0, 0x80)):
            yield bytes([0xC4, 0xE0 | opcode_map, 0x78 | p | length | w])
    for p, opcode_map, w in itertools.product(range(4), (1, 2, 3, 5, 6), (0, 0x80)):
        yield bytes([0x62, 0xF0 | opcode_map, 0x7C | p | w, 0x08])
        yield bytes([0x62, 0xF0 | opcode_map, 0x7C | p | w, 0x49])


def all_instructions(bits: int) -> list[bytes]:
    """Return valid instructions: every opcode of every map with common prefixes and some operands."""
    from iced_x86 import Decoder

    operands = [0x05, 0x00, *range(0x08, 0x40, 8), *range(0xC1, 0x100, 8)]
    found: dict[bytes, None] = {}
    for head, opcode, modrm in itertools.product(heads(bits), range(256), operands):
        data = (head + bytes([opcode, modrm, 0x11, 0x22, 0x33, 0x44]) + bytes(9))[:15]
        instruction = Decoder(bits, data).decode()
        if not instruction.is_invalid and opcode != BREAKPOINT:
            found[data[: instruction.len]] = None
    return list(found)


# What this kernel takes and others do not, or take for something else: target.uprobes leaves it to other engines.
LEFT_OUT = re.compile(rb"\x66[\x40-\x4f]?\x90|[\x64-\x67\xf2\xf3]*[\x40-\x4f][\x26\x2e\x36\x3e\x64-\x67\xf0\xf2\xf3]")


@pytest.mark.parametrize("bits", [64, 32])
def test_the_kernel_takes_exactly_what_the_tables_say(build: Builder, tmp_path: Path, bits: int) -> None:
    instructions = all_instructions(bits)
    assert len(instructions) > 60000
    wrong = [
        raw.hex()
        for raw, taken in zip(instructions, accepted(build, tmp_path, instructions, bits), strict=True)
        if taken == (uprobe_class(raw, bits) is UprobeClass.REFUSED) and LEFT_OUT.match(raw) is None
    ]
    assert wrong == []


DEPENDS_ON_PROCESSOR = ("call_non_canonical",)
"""Intel's processors fault at the call, with nothing pushed; AMD's, and the kernel that emulates it, at the target."""


@dataclass(frozen=True)
class Outcome:
    """Hold what a form said of itself: its digest and counts, and whether it has been stepped; None if it died."""

    line: str | None = None
    stepped: bool | None = None


@dataclass(frozen=True)
class Comparison:
    """Hold the outcomes of all forms without and with uprobes, and the hits of each site."""

    module: Module
    forms: tuple[Form, ...]
    plain: dict[str, Outcome]
    probed: dict[str, Outcome]
    hits: dict[str, int]

    def instruction(self, site: str) -> DecodedInstruction:
        return decode_at(self.module, self.module.file_offset(self.module.address_of(site)))


def is_repeated(module: Module, form: Form, bits: int) -> bool:
    decoded = (decode_at(module, module.file_offset(module.address_of(site))) for site in form.sites)
    return any("element by element" in (refusal(instruction, bits) or "") for instruction in decoded)


def outcomes(program: Path) -> dict[str, Outcome]:
    done = subprocess.run([program, "-", "apart"], capture_output=True, text=True, timeout=TIMEOUT, check=True)
    lines: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, _, rest = line.partition(" ")
        lines.setdefault(name, []).append(rest)
    return {
        name: Outcome(said[0] if said else None, said[1] == "stepped" if len(said) > 1 else None)
        for name, said in lines.items()
    }


@pytest.fixture(scope="module")
def comparison_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Comparison]:
    """Return a function that gives the comparison for a word size, made when it is asked for first."""

    @functools.cache
    def compare(bits: int) -> Comparison:
        variant = VARIANTS[VARIANT_NAMES[bits]]
        program = variant.build(tmp_path_factory.mktemp("forms"))
        module = Module.load(program)
        # What is repeated would be stepped 65 536 times.
        forms = tuple(form for form in variant.forms if not is_repeated(module, form, bits))
        sites = [site for form in forms for site in form.sites]
        plain = outcomes(program)
        with uprobes(program, [module.file_offset(module.address_of(site)) for site in sites]) as counts:
            probed = outcomes(program)
            return Comparison(module, forms, plain, probed, dict(zip(sites, counts.words, strict=True)))

    return compare


def has_features(form: Form) -> bool:
    return not set(form.needs) - processor_flags()


@pytest.mark.parametrize("bits", [64, 32])
def test_a_form_that_may_carry_a_uprobe_does_the_same_with_one(
    comparison_of: Callable[[int], Comparison], bits: int
) -> None:
    comparison = comparison_of(bits)
    wrong, compared = [], 0
    for form in comparison.forms:
        reasons = [refusal(comparison.instruction(site), bits) for site in form.sites]
        # A program that sets its trap flag gets the same traps, but the siginfo tells a signal sent by a process.
        if any(reasons) or form.traps or form.name in DEPENDS_ON_PROCESSOR:
            continue
        compared += 1
        plain, probed = comparison.plain[form.name], comparison.probed.get(form.name, Outcome())
        if plain.line != probed.line:
            wrong.append((form.name, plain.line, probed.line))
    assert wrong == []
    assert compared > 500


@pytest.mark.parametrize("bits", [64, 32])
def test_every_execution_is_one_hit(comparison_of: Callable[[int], Comparison], bits: int) -> None:
    comparison = comparison_of(bits)
    wrong = []
    for form in comparison.forms:
        if any(refusal(comparison.instruction(site), bits) for site in form.sites):
            continue
        runs, _, faults = (int(number, 16) for number in (comparison.plain[form.name].line or "").split()[:3])
        expected = [form.hits * runs if form.hits > 1 and not faults else runs, runs]
        hits = [comparison.hits[site] for site in form.sites]
        if hits[0] != expected[0]:
            wrong.append((form.name, hits, expected))
    assert wrong == []


@pytest.mark.parametrize("bits", [64, 32])
def test_emulated_instructions_are_not_stepped_and_the_others_are(
    comparison_of: Callable[[int], Comparison], bits: int
) -> None:
    comparison = comparison_of(bits)
    wrong = []
    for form in comparison.forms:
        answers = {uprobe_class(comparison.instruction(site).raw, bits) for site in form.sites}
        outcome = comparison.probed.get(form.name, Outcome())
        if answers & {UprobeClass.REFUSED, UprobeClass.BROKEN} or outcome.stepped is None:
            continue
        # Kernels from 6.18 on emulate nops of any length; what is emulated and faults is stepped to get its signal.
        may_be_emulated = all(has_no_effect(comparison.instruction(site).raw, bits) for site in form.sites)
        if outcome.stepped != (UprobeClass.STEPPED in answers) and not may_be_emulated and not form.faults:
            wrong.append((form.name, answers, outcome.stepped))
    assert wrong == []


SAME_HERE = {"pushf_unmapped", "sysenter", "xrstor"}
"""Forms that end in the same fault with a uprobe and without, and one that loads nothing that is withheld."""


@pytest.mark.parametrize("bits", [64, 32])
def test_what_is_called_broken_is_broken(comparison_of: Callable[[int], Comparison], bits: int) -> None:
    comparison = comparison_of(bits)
    broken, unharmed = 0, set()
    for form in comparison.forms:
        answers = {uprobe_class(comparison.instruction(site).raw, bits) for site in form.sites}
        if UprobeClass.BROKEN not in answers or not has_features(form):
            continue
        if form.name not in comparison.plain:
            continue  # this processor does not get through it without uprobes: Intel's with sysenter in 64-bit code
        broken += 1
        if comparison.plain[form.name].line == comparison.probed.get(form.name, Outcome()).line:
            unharmed.add(form.name)
    assert broken > 10
    if repaired := sorted(unharmed - SAME_HERE):
        pytest.skip(f"newer kernel: it carries out what others do not: {', '.join(repaired)}")


def test_a_repeated_instruction_is_hit_once_for_each_element(build: Builder) -> None:
    program = build("repeated.c")
    module = Module.load(program)
    offset = module.file_offset(module.address_of("copying"))
    assert uprobe_class(decode_at(module, offset).raw, 64) is UprobeClass.BROKEN
    with uprobes(program, [offset]) as counts:
        subprocess.run([program, "100"], check=True, timeout=TIMEOUT)
        assert counts.words[0] == 100
