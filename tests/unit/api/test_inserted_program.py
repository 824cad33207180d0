"""Records as dictionaries, tables of Arrow and pandas, and what a notebook shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes import RecordList
from dprobes.formatters.templates.template_model import Fault
from dprobes.record.log_record import LogRecord
from dprobes.record.record_origin import Place

if TYPE_CHECKING:
    from collections.abc import Mapping

OFFSET = 1_700_000_000_000_000_000


class Reader:
    """Say the same of every record."""

    def __init__(self, values: Mapping[str, object] | None) -> None:
        self._values = values

    def values(self, _record: LogRecord) -> Mapping[str, object] | None:
        return self._values

    def function(self, record: LogRecord) -> str:
        assert record.place is not None
        return record.place.routine


def record(values: Mapping[str, object] | None = None, *, time: int | None = 5, data: bytes = b"") -> LogRecord:
    place = Place("libc.so.6", "malloc+0x4", reader=Reader(values))
    return LogRecord(1, 2, pid=42, time=time, process_name="ls", data=data, place=place)


def test_a_dictionary_has_items_place_and_values() -> None:
    assert record({"arg0": 472, "str": "LC_ALL"}).to_dict() == {
        "major": 1, "minor": 2, "pid": 42, "time": 5, "process_name": "ls",
        "module": "libc.so.6", "symbol": "malloc+0x4", "function": "malloc", "at_return": False,
        "arg0": 472, "str": "LC_ALL",
    }  # fmt: skip


def test_a_value_with_the_name_of_an_item_gets_a_number() -> None:
    found = record({"pid": 7, "pid_2": 8}).to_dict()
    assert (found["pid"], found["pid_2"], found["pid_2_2"]) == (42, 7, 8)


def test_data_of_which_nothing_is_known_stays_as_it_is() -> None:
    text = b"\x01\x02\x00hi"
    assert LogRecord(data=text).to_dict() == {"items": [("string", b"hi")], "data": text}
    assert LogRecord(pid=0, data=b"\x05").to_dict() == {"pid": 0, "data": b"\x05"}
    assert record(None, data=b"\x05").to_dict()["data"] == b"\x05"


def test_a_list_is_a_sequence_of_its_records() -> None:
    records = RecordList([record({"n": number}) for number in range(3)], offset=OFFSET)
    assert (len(records), repr(records), records[2]) == (3, "<3 records>", record({"n": 2}))
    part = records[1:]
    assert isinstance(part, RecordList)
    assert [each["n"] for each in part.to_dicts()] == [1, 2]
    assert [each.pid for each in part] == [42, 42]


def test_a_table_has_typed_columns() -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    records = RecordList(
        [
            record({"size": 1 << 63, "error": -2, "name": "a", "stack": (1, 2), "raw": b"\0"}),
            record({"size": 3, "error": 4, "name": Fault(0x10), "stack": (), "raw": None}, time=None),
        ],
        offset=OFFSET,
    )
    table = records.to_arrow()
    types = {field.name: str(field.type) for field in table.schema}
    assert types["time"] == "timestamp[ns]"
    assert (types["size"], types["error"], types["name"]) == ("uint64", "int64", "string")
    assert (types["stack"], types["raw"], types["at_return"]) == ("list<item: uint64>", "binary", "bool")
    assert table["size"].to_pylist() == [1 << 63, 3]
    assert table["name"].to_pylist() == ["a", None]
    assert table["monotonic"].to_pylist() == [5, None]
    assert table["time"].cast("int64").to_pylist() == [OFFSET + 5, None]


def test_records_of_different_definitions_share_a_table() -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    table = RecordList([record({"arg0": 1}), record({"arg0": "x", "more": 2}), record({})]).to_arrow()
    assert table["arg0"].to_pylist() == ["1", "x", None]
    assert table["more"].to_pylist() == [None, 2, None]


def test_bytes_that_are_no_text_do_not_stop_a_table() -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    name = b"a\xff".decode("utf-8", "surrogateescape")
    assert RecordList([record({"name": name})]).to_arrow()["name"].to_pylist() == ["a\\udcff"]


def test_a_data_frame_is_that_table() -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    frame = RecordList([record({"n": number}) for number in (1, 2)], offset=OFFSET).to_pandas()
    assert frame["n"].sum() == 3
    assert str(frame["time"].iloc[0]) == "2023-11-14 22:13:20.000000005"


def test_no_records_are_an_empty_table() -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    assert (RecordList().to_arrow().num_rows, RecordList().to_arrow().num_columns) == (0, 0)
    assert RecordList()._repr_html_() == "<table><thead><tr></tr></thead><tbody></tbody></table>"


def test_a_notebook_shows_the_first_hundred_escaped() -> None:
    html = RecordList([record({"name": "<b>\x1b"})] * 101, offset=OFFSET)._repr_html_()
    assert html.startswith(
        "<table><thead><tr><th>time</th><th>process_name</th><th>pid</th><th>symbol</th><th>name</th></tr></thead>"
        "<tbody><tr><td>2023-11-14T22:13:20.000000005Z</td><td>ls</td><td>42</td><td>malloc+0x4</td>"
        "<td>&lt;b&gt;\\x1b</td></tr>"
    )
    assert html.count("<tr>") == 101
    assert html.endswith("</table><p>… 1 more records</p>")
