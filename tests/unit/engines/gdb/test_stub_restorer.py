"""What is left of a conversation is taken over: breakpoints are taken out, and the target is let go."""

from __future__ import annotations

from dprobes.engines.gdb.remote_protocol import packet
from dprobes.engines.gdb.stub_restorer import Restorer, restore
from dprobes.engines.gdb.stub_transports import open_transport
from support.fake_stub import FakeStub

BEFORE = ["acknowledgements 1", "process 7", "+ 4096 1", "+ 8192 1", "+ 12288 1 55", "- 8192"]


def answer(payload: bytes) -> bytes:
    return b"S05" if payload == b"?" else b"OK"


def test_a_target_that_stands_still() -> None:
    with FakeStub(answer) as fake:
        fake.send(b"$OK#9a")  # the answer to a question of the one who is no more
        restore(fake.transport, [*BEFORE, "running 0"])
        assert fake.asked == [b"z0,1000,1", b"M3000,1:55", b"D;7"]


def test_a_target_that_runs_is_stopped() -> None:
    with FakeStub(answer) as fake:
        original = fake.transport.send

        def send(data: bytes) -> None:
            original(data)
            if data == b"\x03":
                fake.send(packet(b"T02thread:p7.7;"))

        fake.transport.send = send  # type: ignore[method-assign]
        restore(fake.transport, [*BEFORE, "running 1"])
        assert fake.asked[0] == b"\x03"
        assert fake.asked[-3:] == [b"z0,1000,1", b"M3000,1:55", b"D;7"]


def test_an_interrupt_that_has_not_arrived_is_absorbed_before_the_target_is_let_go() -> None:
    def signals(payload: bytes) -> bytes:
        return {b"vCont?": b"vCont;c;s", b"vCont;c": b"T02thread:p7.7;"}.get(payload, answer(payload))

    with FakeStub(signals) as fake:
        original = fake.transport.send

        def send(data: bytes) -> None:
            original(data)
            if data == b"\x03":
                fake.send(packet(b"T05thread:p7.7;"))  # a breakpoint came first

        fake.transport.send = send  # type: ignore[method-assign]
        restore(fake.transport, [*BEFORE, "signals 1", "running 1"])
        assert fake.asked[-4:] == [b"M3000,1:55", b"vCont?", b"vCont;c", b"D;7"]


def test_a_stop_that_was_under_way_needs_no_interrupt() -> None:
    with FakeStub(answer) as fake:
        fake.send(b"$OK#9a$S05#b8")
        restore(fake.transport, [*BEFORE, "running 1"])
        assert fake.asked == [b"z0,1000,1", b"M3000,1:55", b"D;7"]


def test_a_target_that_has_ended() -> None:
    with FakeStub(answer) as fake:
        fake.send(b"$W00#b7")
        restore(fake.transport, [*BEFORE, "running 1"])
        assert fake.asked == []


def test_a_target_whose_stop_nobody_heard_of() -> None:
    with FakeStub(answer) as fake:
        restore(fake.transport, [*BEFORE, "running 1"])
        assert fake.asked[:2] == [b"\x03", b"?"]
        assert fake.asked[-1] == b"D;7"


def test_a_stub_that_goes_away() -> None:
    fake = FakeStub(answer)
    fake._connection.close()
    restore(fake.transport, [*BEFORE, "running 0"])
    assert fake.transport.fileno() == -1


def test_no_process_is_started_for_what_cannot_be_shared() -> None:
    transport = open_transport("|cat -u")
    restorer = Restorer(transport)
    restorer.tell("running 1")
    restorer.leave_to_it()
    restorer.close()
    transport.close()


def test_a_process_that_is_told_that_all_is_done_does_nothing() -> None:
    with FakeStub(answer) as fake:
        restorer = Restorer(fake.transport)
        restorer.tell("+ 4096 1")
        restorer.close()
        assert fake.asked == []
