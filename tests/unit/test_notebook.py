"""What runs in notebooks yield, as it is shown."""

from __future__ import annotations

import json

import pytest

from dprobes.notebook import Recording


def test_nothing_becomes_html() -> None:
    fields = {"<i>": "<script>", "n": 5}
    row = {
        "table": "t",
        "kind": "hist",
        "keys": ["<b>"],
        "count": 3,
        "buckets": [[1, 2, 1], [2, 4, 2]],
        "estimates": {},
    }
    shown = Recording(({"name": "a&b", "pid": 7, "fields": fields},), (row,), ("<hr>",), left_out=4)._repr_html_()
    assert shown == (
        "<div>&lt;hr&gt;</div>\n"
        "<table><thead><tr><th>name</th><th>pid</th><th>&lt;i&gt;</th><th>n</th></tr></thead>"
        "<tbody><tr><td>a&amp;b</td><td>7</td><td>&lt;script&gt;</td><td>5</td></tr></tbody></table>\n"
        "<div>4 records are not kept</div>\n"
        "<table><caption>@t</caption><thead><tr><th>key 1</th><th>count</th><th>buckets</th></tr></thead>"
        "<tbody><tr><td>&lt;b&gt;</td><td>3</td><td>[1, 2): 1, [2, 4): 2</td></tr></tbody></table>"
    )
    assert Recording((), ())._repr_html_() == "<div>no records</div>"


def test_records_and_tables_as_dataframes() -> None:
    pytest.importorskip("pandas", reason="needs pandas")
    row = {"table": "t", "kind": "count", "keys": ["a", 3], "value": 2}
    found = Recording(({"name": "ls", "pid": 7, "fields": {"n": 5}}, {"name": "ls", "pid": 7}), (row,))
    assert json.loads(found.to_pandas().to_json(orient="records")) == [
        {"name": "ls", "pid": 7, "n": 5.0},
        {"name": "ls", "pid": 7, "n": None},
    ]
    assert found.to_pandas("t").to_dict("records") == [{"key 1": "a", "key 2": 3, "value": 2}]
