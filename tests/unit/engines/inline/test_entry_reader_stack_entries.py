"""Entries with a copy of the stack: what becomes of the places that are to have call stacks, and of keys."""

from __future__ import annotations

import os
import struct
from random import Random
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.lower.hosts.hit_thread import REGISTER_OFFSETS
from dprobes.bpf.map_layouts import ENTRY_HEAD, KEY_POSITION, KIND_SHIFT, STACK_COPY, TALLY, Entry
from dprobes.diagnostics import Diagnostics
from dprobes.engines.inline.entry_reader import StackEntries
from dprobes.engines.inline.handler_hits import new_state
from dprobes.errors import FormatError
from dprobes.record.log_record import LogRecord, decode_record, encode_record
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.rpn.instruction_set import StackEnd, Token
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from dprobes.rpn.rpn_program import Program

NOBODY = (1 << 22) - 1
"""No process has this number: kernel.pid_max is lower, or it is taken for the last one only."""


def program(header: str = "", body: str = "log ustack") -> Program:
    text = f"name = x\n{header}offset = 0\n{body}\nexit\n"
    return parse_source(SourceFile("a.rpn", text), Diagnostics(), CompileOptions())


def item(words: list[int]) -> bytes:
    return bytes([Token.USER_STACK]) + struct.pack(f"=H{len(words)}Q", len(words), *words)


def with_copy(head: bytes, last: int, ip: int, stack: bytes = b"", pid: int = NOBODY) -> bytes:
    """Return an entry as a handler makes it."""
    registers = bytearray(168)
    struct.pack_into("=Q", registers, REGISTER_OFFSETS["eip"], ip)
    padding = bytes(-len(head) % 8)
    filled = stack + bytes(-len(stack) % 8)
    return head + padding + registers + filled + STACK_COPY.pack(pid, last, len(head), len(stack))


def record_entry(log: bytes, last: int, ip: int = 0x2000) -> bytes:
    record = encode_record(LogRecord(major=1, minor=2, process_name="x", tid=5, data=log))
    return with_copy(ENTRY_HEAD.pack(3 | Entry.STACKED << KIND_SHIFT, 0) + record, last, ip)


def log_of(entries: StackEntries, entry: bytes) -> bytes:
    return decode_record(entries.record(entry, lambda record: record)).data


def test_only_what_takes_stacks_needs_it() -> None:
    assert StackEntries.of(program(body="log 0"), ()) is None
    assert StackEntries.of(program(), ()) is not None
    assert StackEntries.of(program("table = t, count, ustack[4]\n", "log 0"), ()) is not None


@pytest.mark.parametrize("before", [b"", b"abc"])
def test_the_stack_comes_to_its_place_and_what_is_around_stays(before: bytes) -> None:
    entry = record_entry(before + item([0, 0, 0]) + b"end", len(before) + 1)
    assert log_of(StackEntries(()), entry) == before + item([0x2000, StackEnd.GONE]) + b"end"


def test_several_stacks_of_a_record_lead_from_the_last_to_the_first() -> None:
    log = b"ab" + item([0, 0]) + item([3]) + b"x" + item([22, 0, 0])
    entry = record_entry(log, 34)
    whole, short = item([0x2000, StackEnd.GONE]), item([0x2000])
    assert log_of(StackEntries(()), entry) == b"ab" + whole + short + b"x" + whole


@pytest.mark.parametrize("last", [2, 200, KEY_POSITION])
def test_a_place_that_is_none_stays_as_it_is(last: int) -> None:
    log = item([0, 0])
    assert log_of(StackEntries(()), record_entry(log, last)) == log


def test_a_place_that_leads_to_itself_is_looked_at_once() -> None:
    assert log_of(StackEntries(()), record_entry(item([1, 0]), 1)) == item([0x2000, StackEnd.GONE])


def test_a_number_goes_into_its_table() -> None:
    state = new_state(program("table = u, count\ntable = t, sum, word, ustack[3]\n", "log 0"))
    entries = StackEntries(state.tables)
    key = struct.pack("=2Q3Q", 7, NOBODY, 0, 0, 0)
    for value in (5, -2):
        head = ENTRY_HEAD.pack(Entry.TALLY << KIND_SHIFT, 0) + TALLY.pack(1, 0, value) + key
        entries.tally(with_copy(head, 0, 0x3000))
    (row,) = state.tables[1].contents().rows
    assert row == (struct.pack("=2Q3Q", 7, NOBODY, 0x3000, StackEnd.GONE, 0), (3,))
    assert not state.tables[0].contents().rows
    entries.close()


def test_a_key_has_no_more_frames_than_there_is_room_for() -> None:
    state = new_state(program("table = t, count, ustack[1]\n", "log 0"))
    head = ENTRY_HEAD.pack(Entry.TALLY << KIND_SHIFT, 0) + TALLY.pack(0, 0, 1) + struct.pack("=QQ", os.getpid(), 0)
    StackEntries(state.tables).tally(with_copy(head, 0, 0x3000, bytes(16), os.getpid()))
    ((key, _),) = state.tables[0].contents().rows
    assert key == struct.pack("=QQ", os.getpid(), 0x3000)


def test_of_an_entry_that_was_written_over_nothing_is_believed() -> None:
    random = Random(1)
    made = program("table = t, count, word, ustack[4], room = 1\n", "log ustack")
    state = new_state(made)
    entries = StackEntries.of(made, state.tables)
    assert entries is not None
    head = ENTRY_HEAD.pack(3 | Entry.TALLY << KIND_SHIFT, 0)
    tally = with_copy(head + TALLY.pack(0, 0, 1) + bytes(made.tables[0].key_size), 0, 0x2000, pid=os.getpid())
    record = record_entry(b"ab" + item([0, 0]) + item([3, 0]), 22)
    entries.tally(tally)
    refused = 0
    for _ in range(3000):
        is_tally = random.random() < 0.5
        entry = bytearray(tally if is_tally else record)
        for _ in range(random.choice((1, 2, 8))):
            place = random.choice((random.randrange(len(entry)), random.randrange(len(entry) - 16, len(entry))))
            entry[place] = random.choice((0, 1, 8, 0x7F, 0xFF, random.getrandbits(8)))
        del entry[random.choice((len(entry), random.randrange(len(entry)))) :]
        try:
            if is_tally:
                entries.tally(bytes(entry))
            else:
                decode_record(entries.record(bytes(entry), lambda record: record))
        except FormatError:
            refused += 1
    assert 500 < refused < 2900
    entries.close()
