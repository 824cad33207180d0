"""Messages to the tracer come whole, and the end can be asked for at any moment."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.client.tracer_link import Outbox
from dprobes.engines.ptrace.tracer_messages import End, FrameReader, Remove, load_message

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def reading() -> Iterator[tuple[Outbox, list[object], threading.Thread]]:
    """Give an outbox, what arrives from it, and the thread that reads it until the outbox is closed."""
    incoming, outgoing = os.pipe()
    arrived: list[object] = []

    def read() -> None:
        reader = FrameReader()
        while data := os.read(incoming, 100):
            arrived.extend(load_message(payload) for _, payload in reader.feed(data))

    thread = threading.Thread(target=read)
    thread.start()
    outbox = Outbox(outgoing)
    try:
        yield outbox, arrived, thread
    finally:
        outbox.close()
        thread.join()
        os.close(incoming)


def test_threads_send_whole_messages_and_one_end_for_each_program() -> None:
    def send(number: int) -> None:
        for _ in range(20):
            outbox.send(Remove(0, (number,) * 20_000))  # more than the pipe holds
            outbox.end(number % 2)

    with reading() as (outbox, arrived, _):
        senders = [threading.Thread(target=send, args=(number,)) for number in range(3)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
    assert arrived.count(End(0)) == arrived.count(End(1)) == 1
    for number in range(3):
        assert arrived.count(Remove(0, (number,) * 20_000)) == 20
    assert len(arrived) == 62


def test_a_signal_handler_may_ask_for_the_end_while_a_message_is_being_sent() -> None:
    incoming, outgoing = os.pipe()
    outbox = Outbox(outgoing)
    size = 1 << 20
    arrived: list[object] = []

    def read() -> None:
        reader = FrameReader()
        os.kill(os.getpid(), signal.SIGUSR1)  # the main thread waits for us to read
        while len(arrived) < 2:
            arrived.extend(load_message(payload) for _, payload in reader.feed(os.read(incoming, 1 << 16)))

    former = signal.signal(signal.SIGUSR1, lambda *_: outbox.end(3))
    thread = threading.Thread(target=read)
    timer = threading.Timer(0.1, thread.start)
    try:
        timer.start()
        outbox.send(Remove(0, (1 << 40,) * size))
    finally:
        timer.join()
        thread.join()
        signal.signal(signal.SIGUSR1, former)
        outbox.close()
        os.close(incoming)
    assert arrived == [Remove(0, (1 << 40,) * size), End(3)]


def test_nothing_is_sent_after_the_end() -> None:
    with reading() as (outbox, arrived, thread):
        outbox.send(Remove(0, (1,)))
        outbox.close()
        thread.join()
        outbox.send(Remove(0, (2,)))
        outbox.end(0)
        outbox.close()
    assert arrived == [Remove(0, (1,))]
