"""Programs that are compiled with damaged debug information end in an error, or are compiled: nothing else happens."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import SourceError, TargetError
from dprobes.target.elf.elf_file import ElfFile
from unit.dpc.modules.debugprograms import compiled, rpn_of
from unit.dwarf.conftest import SHAPES
from unit.dwarf.test_corrupt_files import damaged

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
static long kept;
work {
    kept = node->next->inner.b + node->middle + node->is_signed + node->wide + node->table[1][2] + node->x + small;
    kept += node->color == GREEN;
    printf("%s %d", node->name, sizeof(node_t) + offsetof(struct node, both) + count);
}
work+20 { kept = sum + i + count; }
return work { kept = retval + first->low + hidden[2] + ::counted; }
helper { struct node *other = (struct node *)node; kept = other->big; }
pass { kept = inner.b + both.number; }
many { kept = h.b + g; }
"""
MUTANTS = 50  # of each program


@pytest.mark.parametrize(
    "flags", ["-O0", "-O2", "-O1 -gdwarf-4", "-O2 -flto", "-O3 -gdwarf-4", "-O1 -fdebug-types-section"]
)
def test_damaged_debug_information_ends_in_an_error(tmp_path: Path, flags: str) -> None:
    path = compiled(tmp_path, SHAPES, *flags.split())
    data = path.read_bytes()
    sections = [s for s in ElfFile.open(path).sections if s.name.startswith(".debug") and s.size]
    probes = [line for line in PROGRAM.splitlines() if line.endswith("}") and "{" in line]
    probes.append("work { kept = node->next->inner.b + node->middle; }")
    chance = random.Random(flags)
    failed = succeeded = 0
    for number in range(MUTANTS):
        section = sections[number % len(sections)]
        mutant = damaged(data, range(section.offset, section.offset + section.size), chance)
        for text in (PROGRAM, *(f"static long kept; {probe}" for probe in probes)):
            try:
                rpn_of(ElfFile.of_bytes(path, mutant), text)
                succeeded += 1
            except (SourceError, TargetError):
                failed += 1
    assert failed > MUTANTS
    assert succeeded > MUTANTS // 4
