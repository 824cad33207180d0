"""
Displaced code does what the original does: both run on an emulated processor, from the same random registers.

The instructions are those of real libraries, alone and in the windows that they would be displaced in.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, NamedTuple

import pytest
from iced_x86 import Decoder, EncodingKind, Instruction, Mnemonic

from dprobes.platform.x86.patches.branch_targets import kind_of
from dprobes.platform.x86.patches.displaced_code import DisplacedCode, displaced
from dprobes.platform.x86.patches.patch_plans import Plan, look_at
from support.patched_modules import MODULES, code_of, instructions, module_of

pytest.importorskip("unicorn", reason="unicorn is not installed")

from support.emulated_processor import EmulatedProcessor, Outcome, random_registers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.platform.x86.patches.branch_targets import ModuleCode

SAMPLE = 1000
ROUNDS = 2
_RCX = 2
_UNDONE = 16
"""Bytes below the stack pointer that a displaced call uses."""

# What two runs need not agree on, and what the emulated processor does not know.
LEFT_OUT = (
    Mnemonic.SYSCALL, Mnemonic.INT, Mnemonic.RDTSC, Mnemonic.RDTSCP, Mnemonic.RDRAND, Mnemonic.RDSEED,
    Mnemonic.XBEGIN, Mnemonic.POPFQ,
)  # fmt: skip


class Displaced(NamedTuple):
    """Some bytes of the original with their copy."""

    start: int
    raw: bytes
    parts: list[Instruction]
    copy: DisplacedCode

    @property
    def repeats(self) -> bool:
        return any(p.is_string_instruction and (p.has_rep_prefix or p.has_repne_prefix) for p in self.parts)


def displacements(module: ModuleCode, address: int, copies: int) -> Iterator[Displaced]:
    """Give the instruction at an address, and its window if there is one."""
    site = look_at(module, address)
    if isinstance(site, str):
        return
    pieces = [(site.start, site.raw(site.length))]
    window = site.window(())
    if isinstance(window, Plan) and len(window.sizes) > 1:
        pieces.append((window.start, window.raw))
    for start, raw in pieces:
        parts = list(Decoder(64, raw, ip=start))
        unknown = any(part.mnemonic in LEFT_OUT or part.encoding == EncodingKind.XOP for part in parts)
        copy = displaced(raw, start, copies)
        assert copy is not None, f"{raw.hex()} at {start:#x} cannot be displaced"
        if not unknown:
            yield Displaced(start, raw, parts, copy)


def comparable(outcome: Outcome, copy: DisplacedCode, *, calls: bool) -> tuple[object, ...]:
    """Return what must be the same of both runs: a place in the copy stands for that of the original."""
    boundary = copy.at(outcome.pc)
    ignored = range(outcome.stack_pointer - _UNDONE, outcome.stack_pointer) if calls else range(0)
    written = {address: byte for address, byte in outcome.written.items() if address not in ignored}
    return (
        boundary.original if boundary is not None else outcome.pc,
        outcome.fault,
        outcome.registers,
        outcome.vectors,
        written,
    )


def both_outcomes(
    processor: EmulatedProcessor, one: Displaced, registers: tuple[int, ...]
) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Return what is comparable of the original and of the copy."""
    copy, calls = one.copy, kind_of(one.parts[-1].code).calls
    original = processor.run(one.start, one.start + len(one.raw), registers, repeats=one.repeats)
    other = processor.run(copy.address, copy.address + len(copy.code), registers, repeats=True)
    return comparable(original, copy, calls=calls), comparable(other, copy, calls=calls)


def differences(name: str, sample: int | None, random: Random) -> tuple[int, list[str]]:
    """Return how many runs were compared, and what differed; the same bytes are looked at once."""
    module = code_of(name)
    processor = EmulatedProcessor(module_of(name).elf, module.bias, random)
    addresses = [instruction.ip for instruction in instructions(name)]
    if sample is not None:
        addresses = random.sample(addresses, sample)
    compared, found = 0, []
    seen: set[bytes] = set()
    for address in addresses:
        for one in displacements(module, address, processor.copies):
            if one.raw in seen:
                continue
            seen.add(one.raw)
            processor.put(one.copy.address, one.copy.code)
            for _ in range(ROUNDS):
                registers = random_registers(random)
                if one.repeats:
                    registers = (*registers[:_RCX], random.randrange(20), *registers[_RCX + 1 :])
                compared += 1
                original, other = both_outcomes(processor, one, registers)
                if original != other:
                    found.append(f"{one.raw.hex()} at {one.start:#x}: {original[:3]} became {other[:3]}")
    return compared, found


@pytest.mark.parametrize("name", MODULES)
def test_a_sample_of_instructions_and_windows(name: str) -> None:
    compared, found = differences(name, SAMPLE, Random(name))
    assert found == []
    assert compared > SAMPLE


@pytest.mark.torture
@pytest.mark.parametrize("name", MODULES)
def test_all_instructions_and_windows(name: str) -> None:
    _, found = differences(name, None, Random(name))
    assert found == []
