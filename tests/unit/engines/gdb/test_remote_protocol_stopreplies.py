"""Why a target has stopped is read from its reply, or it is an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.engines.gdb.remote_protocol import (
    Console,
    Exited,
    NoThreads,
    Stopped,
    StopReply,
    ThreadId,
    parse_stop_reply,
)
from dprobes.errors import EngineError


@pytest.mark.parametrize(
    ("payload", "reply"),
    [
        (b"S05", Stopped(5, None, {})),
        (b"T05thread:p1.2000;", Stopped(5, ThreadId(1, 0x2000), {})),
        (b"T0506:0102;10:ff;thread:2a;core:1;", Stopped(5, ThreadId(0, 42), {6: b"\x01\x02", 16: b"\xff"})),
        (b"T05swbreak:;", Stopped(5, None, {}, "swbreak")),
        (b"T05watch:00007fff1000;thread:1;", Stopped(5, ThreadId(0, 1), {}, "watch", "7fff1000")),
        (b"W07", Exited(7, None)),
        (b"W00;process:1f", Exited(0, None, 31)),
        (b"X0b;process:1f", Exited(None, 11, 31)),
        (b"N", NoThreads()),
        (b"O68690a", Console(b"hi\n")),
    ],
)
def test_replies(payload: bytes, reply: StopReply) -> None:
    assert parse_stop_reply(payload) == reply


def test_the_address_of_a_watchpoint() -> None:
    reply = parse_stop_reply(b"T05awatch:7f00;")
    assert isinstance(reply, Stopped)
    assert reply.address == 0x7F00
    reply = parse_stop_reply(b"T05swbreak:;")
    assert isinstance(reply, Stopped)
    assert reply.address is None


@pytest.mark.parametrize(
    "payload",
    [b"", b"OK", b"E01", b"T", b"Txx", b"T05thread", b"T0506:0;", b"W", b"Wxx", b"\xff", b"Ozz", b"T05watch:x;"],
)
def test_anything_else_is_an_error(payload: bytes) -> None:
    with pytest.raises(EngineError) as caught:
        parse_stop_reply(payload)
    assert caught.value.message == f"the stub's answer is not a reason for a stop: {payload!r}"


@given(st.binary(max_size=60))
def test_noise_ends_in_an_error_or_a_reply(payload: bytes) -> None:
    for start in (b"", b"T05", b"W", b"X", b"O"):
        try:
            parse_stop_reply(start + payload)
        except EngineError:
            continue


def test_threads() -> None:
    assert ThreadId.parse("p1f.2a") == ThreadId(31, 42)
    assert ThreadId.parse("p1f") == ThreadId(31, 0)
    assert ThreadId.parse("2a") == ThreadId(0, 42)
    assert str(ThreadId(31, 42)) == "p1f.2a"
    assert str(ThreadId(0, 42)) == "2a"
    with pytest.raises(EngineError) as caught:
        ThreadId.parse("pq.1")
    assert caught.value.message == "the stub named a thread 'pq.1'"
