"""Who writes and who relies on which bytes of a module's code."""

from __future__ import annotations

import pytest

from dprobes.platform.x86.patches.branch_targets import CodeBytes, CodeRange, ControlFlow, ModuleCode
from dprobes.target.process_maps import PAGE_SIZE
from support.patched_modules import code_of, mappings_around

START = 0x1000


def test_written_bytes_are_someones_until_they_are_restored() -> None:
    code = CodeBytes(START, b"abcdefgh")
    code.write(START + 2, b"XYZ")
    assert bytes(code.current) == b"abXYZfgh"
    assert code.original == b"abcdefgh"
    assert [code.is_written(START + n, 1) for n in range(8)] == [False, False, True, True, True, False, False, False]
    assert code.is_written(START, 3)
    code.restore(START + 2, 3)
    assert bytes(code.current) == b"abcdefgh"
    assert not code.is_written(START, 8)


def test_bytes_that_jumps_rely_on_stay_as_they_are() -> None:
    code = CodeBytes(START, b"abcdefgh")
    code.write(START + 2, b"XYZ")
    code.rely(START + 4, START + 6)
    code.rely(START + 4, START + 5)
    assert [code.is_relied_on(START + n, 1) for n in range(8)] == [False] * 4 + [True] * 2 + [False] * 2
    assert [code.is_free(START + n, 2) for n in range(7)] == [True, False, False, False, False, False, True]
    code.rely(START + 4, START + 6, -1)
    assert code.is_relied_on(START + 2, 3)
    code.rely(START + 4, START + 5, -1)
    assert not code.is_relied_on(START + 2, 3)
    code.restore(START + 2, 3)
    assert bytes(code.current) == b"abcdefgh"


def test_code_is_where_the_module_is_mapped() -> None:
    ranges = [CodeRange(0x100, 0x108, b"abcdefgh"), CodeRange(0x200, 0x204, b"ijkl")]
    module = ModuleCode(ranges, ControlFlow(frozenset()), 0x7000, 0x1000)
    found = [module.around(address) for address in (0x70FF, 0x7100, 0x7107, 0x7108, 0x7200, 0x7204)]
    assert [code and code.start for code in found] == [None, 0x7100, 0x7100, None, 0x7200, None]


def test_unchanged_code_is_another_one() -> None:
    module = ModuleCode([CodeRange(0x100, 0x104, b"abcd")], ControlFlow(frozenset()), 0x7000, 0x1000)
    module.ranges[0].write(0x7100, b"X")
    fresh = module.unchanged()
    assert bytes(fresh.ranges[0].current) == b"abcd"
    assert bytes(module.ranges[0].current) == b"Xbcd"
    assert (fresh.bias, fresh.size, fresh.flow) == (0x7000, 0x1000, module.flow)
    moved = module.mapped_at(0x9000)
    assert (moved.ranges[0].start, bytes(moved.ranges[0].current)) == (0x9100, b"abcd")
    assert (moved.bias, moved.size, moved.flow) == (0x9000, 0x1000, module.flow)


@pytest.mark.parametrize("name", ["libsqlite3.so.0", "python3"])
def test_the_size_of_a_module_is_that_of_its_mappings(name: str) -> None:
    own = next(mapping for mapping in mappings_around(name) if mapping.path == f"/{name}")
    assert own.end - own.start - 2 * PAGE_SIZE < code_of(name).size <= own.end - own.start
