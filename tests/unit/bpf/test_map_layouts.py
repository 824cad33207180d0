"""The names of maps: those of keyed tables are members from their first use on."""

from __future__ import annotations

import pickle

import pytest

from dprobes.bpf.map_layouts import MapName, table_map
from dprobes.rpn.keyed_tables import TABLES_MAX


def test_each_table_has_one_name() -> None:
    last = TABLES_MAX - 1
    assert table_map(last) is table_map(last)
    assert table_map(last) is MapName(f"table {last}")
    assert table_map(last) != table_map(0)
    assert (table_map(last).name, table_map(last).value) == (f"TABLE_{last}", f"table {last}")
    assert {table_map(3): "found"}[MapName("table 3")] == "found"


@pytest.mark.parametrize("name", [MapName.RING, table_map(5)])
def test_a_name_is_the_same_after_a_pickle(name: MapName) -> None:
    assert pickle.loads(pickle.dumps(name)) is name


@pytest.mark.parametrize("value", [f"table {TABLES_MAX}", "table 05", "table -1", "table ", "table", "table x", "", 3])
def test_no_other_value_is_a_name(value: object) -> None:
    with pytest.raises(ValueError, match="is not a valid MapName"):
        MapName(value)
