"""The queue of what is held back, beside a list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dprobes.engines.ebpf.read.held_records import HeldQueue
from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_table import RecordTable

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["add", "pack", "drop", "take"]), st.integers(1, 9), st.integers(0, 1000)), max_size=40
)


@given(ACTIONS)
def test_it_holds_what_a_list_holds(actions: list[tuple[str, int, int]]) -> None:
    queue, items, first = HeldQueue(), list[tuple[int, bytes] | None](), 0
    for number, (action, count, place) in enumerate(actions):
        records = [(number, encode_record(LogRecord(n, number))) for n in range(count)]
        at = first + place % max(len(items), 1)
        match action:
            case "add":
                queue.add(records)
                items += records
            case "pack":
                packed = RecordTable.of_records(records)
                assert packed is not None
                queue.add_packed(packed)
                items += records
            case "drop" if items and (item := items[at - first]) is not None:
                assert queue.probe(at) == item[0]
                queue.drop(at)
                items[at - first] = None
            case "take":
                taken = [item for part in queue.take(at) for item in part]
                assert taken == items[: at - first]
                del items[: at - first]
                first = at
        assert (queue.first, queue.end, bool(queue)) == (first, first + len(items), bool(items))
    assert [item for part in queue.take(queue.end) for item in part] == items
