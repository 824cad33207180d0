"""Finding keyed tables by their names."""

from __future__ import annotations

import pytest

from dprobes.errors import EngineError
from dprobes.rpn.keyed_tables import Table, TableKind, tables_matching

TABLES = [Table(name, TableKind.COUNT) for name in ("hits", "_", "histogram")]


@pytest.mark.parametrize(("pattern", "numbers"), [("hits", [0]), ("_", [1]), ("hi*", [0, 2]), ("*", [0, 1, 2])])
def test_tables_are_found_by_name_or_pattern(pattern: str, numbers: list[int]) -> None:
    assert tables_matching(pattern, TABLES) == numbers


def test_a_name_that_no_table_has_is_an_error() -> None:
    with pytest.raises(EngineError) as caught:
        tables_matching("hit", TABLES)
    assert (caught.value.message, caught.value.hint) == (
        "no keyed table is called 'hit'",
        "there are: hits, _, histogram",
    )
    with pytest.raises(EngineError) as caught:
        tables_matching("*", [])
    assert caught.value.hint == "the program has none"
