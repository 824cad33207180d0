"""Packets are acknowledged, sent again when they were refused, and refused when they are damaged, not for ever."""

from __future__ import annotations

import pytest

from dprobes.engines.gdb.remote_protocol import Conversation, Received, packet
from dprobes.errors import EngineError

OK = packet(b"OK")


def test_an_answer_is_acknowledged() -> None:
    conversation = Conversation()
    assert conversation.ask(b"?") == b"$?#3f"
    assert not conversation.is_acknowledged
    assert conversation.receive(b"+") == Received((), (), b"")
    assert conversation.is_acknowledged
    assert conversation.receive(OK) == Received((b"OK",), (), b"+")


def test_nothing_is_acknowledged_where_nothing_is_lost() -> None:
    conversation = Conversation()
    conversation.has_acknowledgements = False
    conversation.ask(b"?")
    assert conversation.is_acknowledged
    assert conversation.receive(OK) == Received((b"OK",), (), b"")


def test_what_is_refused_is_sent_again_some_times() -> None:
    conversation = Conversation()
    sent = conversation.ask(b"?")
    assert [conversation.receive(b"-").reply for _ in range(4)] == [sent] * 4
    with pytest.raises(EngineError) as caught:
        conversation.receive(b"-")
    assert caught.value.message == "the stub has refused the packet b'$?#3f' 5 times"


def test_a_late_refusal_means_nothing() -> None:
    conversation = Conversation()
    conversation.ask(b"?")
    conversation.receive(OK)
    assert conversation.receive(b"-") == Received((), (), b"")


def test_damaged_packets_are_refused_some_times() -> None:
    conversation = Conversation()
    conversation.ask(b"?")
    assert [conversation.receive(b"$OK#00").reply for _ in range(4)] == [b"-"] * 4
    with pytest.raises(EngineError) as caught:
        conversation.receive(b"$OK#00")
    assert caught.value.message == ("the stub sent a packet that is damaged: its checksum is b'00', not b'9a'")


def test_a_damaged_packet_is_an_error_where_nothing_is_lost() -> None:
    conversation = Conversation()
    conversation.has_acknowledgements = False
    with pytest.raises(EngineError):
        conversation.receive(b"$OK#00")


def test_notifications_are_not_acknowledged() -> None:
    assert Conversation().receive(b"%Stop:S05#" + b"%02x" % (sum(b"Stop:S05") & 0xFF)) == Received(
        (), (b"Stop:S05",), b""
    )
