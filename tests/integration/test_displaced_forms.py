"""
Every form of instruction does in a trampoline what it does in its place.

The program of ``test_forms.py`` is linked with room for trampolines. In a copy of its file a jump stands at each site
that allows one without a punned jump, and what was displaced lies in that room; both files run, and print the same
digests.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from iced_x86 import Decoder, OpKind

from dprobes.platform.x86.instruction_relocation import copy_of
from dprobes.platform.x86.patches.branch_targets import ModuleCode
from dprobes.platform.x86.patches.displaced_code import displaced
from dprobes.platform.x86.patches.patch_placer import Placement, Placer
from dprobes.platform.x86.patches.trampoline_space import AddressSpace
from dprobes.target.probed_module import Module
from dprobes.target.process_maps import Mapping
from integration.form_programs import (
    FLAGS,
    VARIANTS,
    Batch,
    Line,
    Variant,
    batches_of,
    lines_of,
    plain_output,
    processor_flags,
)
from integration.support import PROGRAMS, TIMEOUT
from support.form_table import assembly

if TYPE_CHECKING:
    from pathlib import Path

    from iced_x86 import Instruction

    from support.form_table import Form

ROOM, TRAMPOLINES = 80, 1 << 20
RESERVE = (
    f'.section .trampolines, "ax", @progbits\n.globl trampolines\n.balign 4096\ntrampolines: .fill {TRAMPOLINES}\n'
    '.section .note.GNU-stack, "", @progbits\n'
)
NAMES = ("x86_64", "x86_64_high")


@dataclass(frozen=True)
class Comparison:
    """Both programs, the lines of their runs, and which sites have a jump."""

    programs: tuple[Path, Path]
    plain: dict[str, Line]
    displaced: dict[str, Line]
    placed: dict[str, Placement]


def build(variant: Variant, directory: Path) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    (directory / "table.S").write_text(assembly(variant.forms, 8))
    (directory / "reserve.S").write_text(RESERVE)
    inputs = [PROGRAMS / "forms" / "harness.c", PROGRAMS / "forms" / "enter64.S"]
    inputs += [directory / "table.S", directory / "reserve.S"]
    where = ("-fPIE", f"-Wl,-Ttext-segment={variant.base:#x}")
    subprocess.run(["gcc", *FLAGS, *where, "-o", directory / "forms", *inputs], check=True, timeout=TIMEOUT)
    return directory / "forms"


def place(module: Module, sites: dict[str, int]) -> dict[str, Placement]:
    """Return the placements of sites by name, with all trampolines in the room for them."""
    room = module.address_of("trampolines")
    everything_else = [
        Mapping(start, end, "r-xp", 0, 0, 0, "", False) for start, end in ((0, room), (room + TRAMPOLINES, 1 << 47))
    ]
    space = AddressSpace(everything_else, room - 1, room)
    placer = Placer(ModuleCode.of(module, 0), space, ROOM)
    names = {address: name for name, address in sites.items()}
    found = placer.place(names, windows_first=True)
    return {names[one.plan.site]: one for one in found if isinstance(one, Placement)}


def write(module: Module, placed: dict[str, Placement], output: Path) -> None:
    """Write the file with the jumps and the trampolines in it."""
    data = bytearray(module.elf.data[:])
    for one in placed.values():
        copy = displaced(one.plan.raw, one.plan.start, one.trampoline)
        assert copy is not None
        assert len(copy.code) <= ROOM
        for address, code in ((one.trampoline, copy.code), *one.writes):
            offset = module.file_offset(address)
            data[offset : offset + len(code)] = code
    output.write_bytes(data)
    output.chmod(0o755)


@pytest.fixture(scope="module")
def comparisons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Comparison]:
    made = {}
    for name in NAMES:
        directory = tmp_path_factory.mktemp(name)
        program = build(VARIANTS[name], directory)
        module = Module.load(program)
        sites = {form.name: module.address_of(form.sites[0]) for form in VARIANTS[name].forms}
        placed = place(module, sites)
        write(module, placed, directory / "displaced")
        programs = program, directory / "displaced"
        plain, other = (lines_of(plain_output(path, "-")) for path in programs)
        made[name] = Comparison(programs, plain, other, placed)
    return made


def displaced_instructions(placed: Placement) -> list[Instruction]:
    return list(Decoder(64, placed.plan.raw, ip=placed.plan.start))


def calls_through_memory(placed: Placement) -> bool:
    last = displaced_instructions(placed)[-1]
    return last.is_call_near_indirect and last.op0_kind == OpKind.MEMORY


def keeps_its_address(placed: Placement) -> bool:
    """Return whether the x87 unit keeps the address of an instruction: Intel's do always, AMD's on exceptions only."""
    raws = (placed.plan.raw[one.ip - placed.plan.start :][: one.len] for one in displaced_instructions(placed))
    is_intel = "vmmcall" not in processor_flags()
    return is_intel and any(copy_of(raw, 8) is None and raw[0] in range(0xD8, 0xE0) for raw in raws)


@pytest.mark.parametrize("name", NAMES)
def test_most_forms_are_displaced(comparisons: dict[str, Comparison], name: str) -> None:
    one = comparisons[name]
    assert one.displaced.keys() == one.plain.keys()
    assert len(one.placed) >= 0.9 * len(one.plain)


@pytest.mark.parametrize("batch", batches_of(*NAMES), ids=str)
def test_forms(comparisons: dict[str, Comparison], batch: Batch) -> None:
    batch.need()
    batch.check(lambda form: problem_of(comparisons[batch.variant], form))


def problem_of(one: Comparison, form: Form) -> str:
    """Return in what a form differs from what it is in its place."""
    plain, other, placed = one.plain[form.name], one.displaced[form.name], one.placed.get(form.name)
    if plain.signals or (placed is not None and keeps_its_address(placed)):
        # The digest has the address of the fault, which is in the trampoline.
        is_same = (other.runs, other.signals) == (plain.runs, plain.signals)
    elif placed is not None and calls_through_memory(placed):
        states = [Counter(plain_output(path, form.name).splitlines()[:-1]) for path in one.programs]  # no digest
        more = list((states[1] - states[0]).elements())
        # The target is left in the stack, below what the call pushes.
        is_same = states[0] - states[1] == Counter() and len(more) == plain.runs
        is_same = is_same and all(line.strip().startswith("arena+") for line in more)
    else:
        is_same = other == plain
    return "" if is_same else f"{other} is not {plain}"
