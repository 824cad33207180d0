"""Packets are found in what comes, in whatever pieces; what is damaged is said to be, and nothing behind it is lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.engines.gdb.remote_protocol import Message, MessageKind, PacketReader, packet

PAYLOADS = st.binary(max_size=80)


def messages_of(*pieces: bytes) -> list[Message]:
    reader = PacketReader()
    return [message for piece in pieces for message in reader.feed(piece)]


def checked(sent: bytes) -> bytes:
    """Return a packet of what is sent as it is."""
    return b"$%b#%02x" % (sent, sum(sent) & 0xFF)


def test_what_is_sent() -> None:
    assert packet(b"m1000,4") == b"$m1000,4#8e"
    assert packet(b"a$b#c}d*") == b"$a}\x04b}\x03c}]d}\x0a#" + b"%02x" % (sum(b"a}\x04b}\x03c}]d}\x0a") & 0xFF)


@given(st.lists(PAYLOADS, max_size=5), st.lists(st.integers(0, 400), max_size=12))
def test_payloads_arrive_in_every_split(payloads: list[bytes], cuts: list[int]) -> None:
    data = b"+".join(packet(payload) for payload in payloads)
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in pairwise(bounds)]
    found = [message.payload for message in messages_of(*pieces) if message.kind is MessageKind.PACKET]
    assert found == payloads


@given(st.binary(max_size=1200))
def test_a_checksum_is_the_sum_of_what_is_sent(payload: bytes) -> None:
    sent = packet(payload)
    assert int(sent[-2:], 16) == sum(sent[1:-3]) & 0xFF


def test_messages_are_those_of_any_split() -> None:
    data = b"++" + packet(b"T05") + b"+" + packet(b"0a" * 300) + b"-" + packet(b"a#b") + checked(b"0* ") + b"+$ab#00+"
    found = messages_of(data)
    assert [message.payload for message in found if message.kind is MessageKind.PACKET] == [
        b"T05", b"0a" * 300, b"a#b", b"0000",
    ]  # fmt: skip
    assert [message.kind.name[:3] for message in found] == [
        "ACK", "ACK", "PAC", "ACK", "PAC", "REF", "PAC", "PAC", "ACK", "DAM", "ACK",
    ]  # fmt: skip
    for step in (1, 2, 5, 64, 500):
        assert messages_of(*(data[n : n + step] for n in range(0, len(data), step))) == found


@given(st.binary(max_size=300), st.integers(1, 7))
def test_noise_ends_in_messages_and_never_otherwise(data: bytes, step: int) -> None:
    whole = messages_of(data)
    assert messages_of(*(data[n : n + step] for n in range(0, len(data), step))) == whole
    assert PacketReader().feed(data + b"#00" + packet(b"OK"))[-1] == Message(MessageKind.PACKET, b"OK")


def test_runs() -> None:
    assert messages_of(checked(b"0* ")) == [Message(MessageKind.PACKET, b"0000")]  # " " is 29 + 3
    assert messages_of(checked(b"xyz*!0")) == [Message(MessageKind.PACKET, b"xyzzzzz0")]
    assert messages_of(checked(b"}\x03*\x1f")) == [Message(MessageKind.PACKET, b"###")]


def test_signs_between_packets() -> None:
    found = messages_of(b"+-noise+" + packet(b"") + b"%" + packet(b"Stop:T05")[1:])
    assert [message.kind.name for message in found] == [
        "ACKNOWLEDGEMENT", "REFUSAL", "ACKNOWLEDGEMENT", "PACKET", "NOTIFICATION",
    ]  # fmt: skip
    assert found[-1].payload == b"Stop:T05"


def test_a_notification_has_its_own_start() -> None:
    assert messages_of(b"%abc#26") == [Message(MessageKind.NOTIFICATION, b"abc")]


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (b"$abc#00", b"its checksum is b'00', not b'26'"),
        (b"$abc#zz", b"its checksum is b'zz', not b'26'"),
        (checked(b"ab}"), b"it ends within an escape sequence"),
        (checked(b"ab*"), b"it ends within a run"),
        (checked(b"*!a"), b"it begins with a run of nothing"),
        (checked(b"a*\x1c"), b"a run is of less than no characters"),
    ],
)
def test_damaged_packets(sent: bytes, problem: bytes) -> None:
    assert messages_of(sent + packet(b"next")) == [
        Message(MessageKind.DAMAGED, problem),
        Message(MessageKind.PACKET, b"next"),
    ]


def test_a_packet_without_an_end_before_another_one_is_noise() -> None:
    assert messages_of(b"$abc" + packet(b"next")) == [Message(MessageKind.PACKET, b"next")]


def test_a_packet_does_not_grow_without_end() -> None:
    reader = PacketReader()
    piece = b"$" + b"a" * (1 << 20)
    found: list[Message] = []
    while not found:
        found = reader.feed(piece[1:] if reader.is_within else piece)
    assert found == [Message(MessageKind.ENDLESS)]
    assert not reader.is_within
    run = checked(b"a" + b"*~" * 60000)
    assert messages_of(run) == [Message(MessageKind.DAMAGED, b"it is longer than any packet")]
