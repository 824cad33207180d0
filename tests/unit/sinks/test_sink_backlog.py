"""The queue between programs and a log target: its bounds, and that each record is in one count."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dprobes.record.record_origin import RecordSource
from dprobes.sinks import Batch
from dprobes.sinks.sink_backlog import Created, Destroyed, Message, RecordQueue, Tables
from unit.sinks.records import OTHER, PLACE, SOURCE, batch, record


def of_sizes(*sizes: int) -> Batch:
    return Batch(SOURCE, [bytes(size) for size in sizes], [PLACE] * len(sizes), 0)


def records_of(message: Message) -> list[bytes]:
    assert isinstance(message, Batch)
    assert len(message.places) == len(message.records)
    return list(message.records)


def test_what_finds_no_room_is_lost_and_the_next_batch_of_the_program_says_so() -> None:
    queue = RecordQueue(records_max=4)
    queue.put(batch(1, 2, 3))
    queue.put(batch(4, 5, 6, lost=7))
    queue.put(batch(1, source=OTHER))
    assert (queue.waiting, queue.lost) == (4, 3)
    assert queue.take(queue.first(10), 3)
    second = queue.first(10)
    assert isinstance(second, Batch)
    assert (records_of(second), second.lost) == ([record(4)], 7)
    assert queue.take(second, 1)
    queue.put(batch(8))
    third = queue.first(10)
    assert isinstance(third, Batch)
    assert third.lost == 2
    assert queue.take(third, 1)
    queue.put(batch(2, source=OTHER))
    fourth = queue.first(10)
    assert isinstance(fourth, Batch)
    assert fourth.lost == 1


def test_before_the_end_of_a_program_stands_how_many_of_its_last_records_were_lost() -> None:
    queue = RecordQueue(records_max=2)
    queue.put(batch(1, 2, 3))
    queue.put(batch(4, 5))
    queue.tell([Destroyed(OTHER), Destroyed(SOURCE)])
    assert queue.take(queue.first(10), 2)
    assert queue.first(10) == Destroyed(OTHER)
    assert queue.take(queue.first(10), 0)
    last = queue.first(10)
    assert isinstance(last, Batch)
    assert (records_of(last), last.lost, last.source) == ([], 3, SOURCE)
    assert queue.take(last, 0)
    assert queue.first(10) == Destroyed(SOURCE)
    assert queue.take(queue.first(10), 0)
    assert not queue


def test_bytes_are_bounded_as_well() -> None:
    queue = RecordQueue(bytes_max=100)
    queue.put(of_sizes(40, 40, 40))
    assert (queue.waiting, queue.lost) == (2, 1)
    queue.put(of_sizes(20))
    assert (queue.waiting, queue.lost) == (3, 1)
    queue.put(of_sizes(1))
    assert (queue.waiting, queue.lost) == (3, 2)
    assert queue.take(queue.first(1), 1)
    queue.put(of_sizes(40, 1))
    assert (queue.waiting, queue.lost) == (3, 3)


def test_a_batch_is_given_in_pieces_and_keeps_what_was_not_taken() -> None:
    queue = RecordQueue()
    queue.put(batch(1, 2, 3, 4, 5, lost=9))
    queue.tell([Created(OTHER)])
    first = queue.first(2)
    assert isinstance(first, Batch)
    assert (records_of(first), first.lost) == ([record(1), record(2)], 9)
    assert queue.take(first, 1)
    assert not queue.take(first, 1)  # it is another one now
    again = queue.first(2)
    assert isinstance(again, Batch)
    assert (records_of(again), again.lost) == ([record(2), record(3)], 0)
    assert queue.take(again, 1)
    first = queue.first(1)
    assert records_of(first) == [record(3)]
    rest = queue.first(100)
    assert records_of(rest) == [record(3), record(4), record(5)]
    queue.drop(rest)
    assert (queue.waiting, queue.lost) == (0, 3)
    created = queue.first(1)
    assert created == Created(OTHER)
    assert queue.take(created, 0)
    assert not queue


def test_small_batches_are_given_as_one_unless_there_is_something_to_be_said_between_them() -> None:
    queue = RecordQueue()
    for each in (batch(1), batch(2, 3), batch(4, 5, 6), batch(7, lost=2), batch(8)):
        queue.put(each)
    queue.put(batch(9, source=OTHER))
    first = queue.first(5)
    assert records_of(first) == [record(n) for n in range(1, 6)]
    assert queue.take(first, 5)
    given = []
    while queue:
        message = queue.first(100)
        assert isinstance(message, Batch)
        given.append((message.source.name, records_of(message), message.lost))
        assert queue.take(message, len(message.records))
    assert given == [
        ("app", [record(6)], 0), ("app", [record(7), record(8)], 2), ("other", [record(9)], 0),
    ]  # fmt: skip
    assert queue.waiting == 0


def test_what_is_left_anywhere_in_a_batch_stays() -> None:
    queue = RecordQueue(records_max=6)
    queue.put(batch(1, 2, 3, 4, 5, 6, lost=9))
    first = queue.first(4)
    assert queue.keep(first, [0, 2])
    assert not queue.keep(first, [0, 2])  # it is another one now
    again = queue.first(2)
    assert isinstance(again, Batch)
    assert (records_of(again), again.lost, queue.waiting) == ([record(1), record(3)], 9, 4)
    assert queue.keep(again, [1])
    again = queue.first(1)
    assert isinstance(again, Batch)
    assert (records_of(again), again.lost, queue.waiting) == ([record(3)], 0, 3)
    assert queue.keep(again, [])
    assert records_of(queue.first(9)) == [record(5), record(6)]
    queue.put(batch(7, 8, 9, 10, 11))
    assert (queue.waiting, queue.lost) == (6, 1)


def test_what_is_given_up_is_lost_once() -> None:
    queue = RecordQueue()
    queue.put(batch(1, 2, 3))
    message = queue.first(2)
    queue.give_up()
    assert (queue.waiting, queue.lost) == (0, 3)
    queue.settle()
    assert not queue.take(message, 2)
    queue.drop(message)
    queue.put(batch(4))
    queue.tell([Created(SOURCE)])
    assert (queue.waiting, queue.lost, bool(queue)) == (0, 4, False)


@given(
    st.lists(
        st.tuples(st.just("put"), st.integers(1, 30))
        | st.tuples(st.just("take"), st.integers(1, 30))
        | st.tuples(st.just("drop"), st.integers(1, 30)),
        max_size=60,
    )
)
def test_every_record_is_taken_lost_or_waiting(steps: list[tuple[str, int]]) -> None:
    queue = RecordQueue(records_max=50, bytes_max=700)
    sent = taken = said = 0
    for step, count in steps:
        if step == "put":
            sizes = [(sent + n) % 40 for n in range(count)]
            queue.put(of_sizes(*sizes))
            sent += count
        elif queue:
            message = queue.first(count)
            assert isinstance(message, Batch)
            if step == "drop":
                queue.drop(message)
                continue
            some = len(message.records) // 2 + 1
            assert queue.take(message, some)
            taken += some
            said += message.lost
        assert sent == taken + queue.waiting + queue.lost
        assert queue.waiting <= 50
    while queue:
        message = queue.first(7)
        taken += len(records_of(message))
        assert isinstance(message, Batch)
        said += message.lost
        assert queue.take(message, len(message.records))
    assert sent == taken + queue.lost
    assert said + sum(queue._lost_before.values()) == queue.lost
    assert queue._bytes == 0


def test_only_the_latest_tables_of_a_program_wait() -> None:
    queue = RecordQueue()
    one, other = RecordSource(1, "one"), RecordSource(2, "other")
    sent = [Tables(one, []), Tables(one, []), Tables(other, []), Tables(one, [])]
    for each in sent:
        queue.put_tables(each)
    found = []
    while queue:
        found.append(queue.first(10))
        assert queue.take(found[-1], 0)
    # The first one may have been on its way already.
    assert [id(each) for each in found] == [id(sent[0]), id(sent[2]), id(sent[3])]
    queue.give_up()
    queue.put_tables(sent[0])
    assert not queue


def test_what_a_sink_has_taken_when_all_is_given_up_is_not_lost() -> None:
    queue = RecordQueue()
    queue.put(batch(0, 1, 2, 3, 4))
    queue.put(batch(5, lost=3))
    message = queue.first(5)
    queue.give_up()
    assert queue.lost == 6
    assert queue.keep(message, [1, 4])
    assert queue.lost == 3
    assert not queue.keep(message, [])
    assert not queue.take(message, 5)
    assert queue.lost == 3
