"""What is asked of a stub, and what becomes of answers: of few features, of many, of wrong ones and of none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.engines.gdb.remote_protocol import Exited, NoThreads, Stopped, ThreadId, packet
from dprobes.engines.gdb.stub_requests import BreakpointKind, Stub
from dprobes.errors import EngineError
from integration.support import TIMEOUT
from support.fake_stub import FakeStub

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

THREAD = ThreadId(1, 0x2A)


def script(answers: Mapping[bytes, bytes]) -> Callable[[bytes], bytes]:
    """Return a function that answers what is known, and is silent on all else as stubs are: with an empty packet."""

    def answer(payload: bytes) -> bytes:
        for known, text in answers.items():
            if payload.startswith(known):
                return text
        return b""

    return answer


def started(stub: FakeStub, patience: float = 2.0) -> Stub:
    made = Stub(stub.transport, patience)
    made.start()
    return made


def test_features() -> None:
    with FakeStub(script({b"qSupported": b"PacketSize=3ff;multiprocess+;QStartNoAckMode-;vCont?"})) as fake:
        stub = started(fake)
        assert stub.features == {"PacketSize": "3ff", "multiprocess": "+", "QStartNoAckMode": "-", "vCont": "?"}
        assert stub.knows("multiprocess")
        assert not stub.knows("QStartNoAckMode")
        assert not stub.raises_signals


def test_nothing_is_acknowledged_once_both_agree() -> None:
    with FakeStub(script({b"qSupported": b"QStartNoAckMode+", b"QStartNoAckMode": b"OK"})) as fake:
        stub = started(fake)
        assert stub.ask("?") == b""
        assert fake.asked[1:] == [b"QStartNoAckMode", b"Hg0", b"?"]


def test_a_stop_that_nobody_asked_for_is_forgotten_at_the_start() -> None:
    with FakeStub(script({b"?": b"S05"})) as fake:
        fake.send(b"$T05thread:1;#aa+$S11#b5")
        assert started(fake).reason() == Stopped(5, None, {})


def test_a_stop_that_comes_late_is_no_answer() -> None:
    late = packet(b"T02thread:p01.01;") + packet(b"multiprocess+")
    with FakeStub(script({b"qSupported": late})) as fake:
        assert started(fake).features == {"multiprocess": "+"}


def test_the_second_stop_of_an_interrupt_is_no_answer_however_late_it_comes() -> None:
    stop = packet(b"T05thread:p01.01;")
    with FakeStub(script({b"?": b"T05", b"c": b"T05", b"g": stop + packet(b"0011"), b"m": b"T05"})) as fake:
        stub = started(fake)
        stub.resume([("c", None)])
        stub.interrupt()
        assert stub.wait(TIMEOUT) == Stopped(5, None, {})
        stub.drain()
        assert stub.ask("g") == b"0011"
        assert stub.reason() == Stopped(5, None, {})
        stub.resume([("c", None)])
        assert stub.wait(TIMEOUT) == Stopped(5, None, {})
        assert stub.ask("m0,1") == b"T05"  # nobody has interrupted it: it is a wrong answer


def test_what_was_told_is_answered_before_a_target_is_let_go() -> None:
    with FakeStub(script({b"P": b"OK", b"z0": b"OK", b"D": b"OK"})) as fake:
        stub = started(fake)
        stub.remove(BreakpointKind.SOFTWARE, 0x1000, 1)
        stub.remove(BreakpointKind.SOFTWARE, 0x2000, 1)
        assert stub.detach(0)
        assert fake.asked[-3:] == [b"z0,1000,1", b"z0,2000,1", b"D"]


def test_memory_is_read_in_batches() -> None:
    content = bytes(range(256)) * 40

    def answer(payload: bytes) -> bytes:
        if payload.startswith(b"m"):
            start, size = (int(number, 16) for number in payload[1:].split(b","))
            return content[start : start + size].hex().encode() or b"E14"
        return b"PacketSize=200" if payload.startswith(b"qSupported") else b""

    with FakeStub(answer) as fake:
        stub = started(fake)
        assert stub.read_in_batches(10, 9000) == content[10:9010]
        assert stub.read_in_batches(10000, 4000) == content[10000:]
        assert stub.read_in_batches(20000, 10) == b""
        assert stub.ask("?") == b""


def test_a_stub_that_does_not_answer() -> None:
    with FakeStub(lambda _: None) as fake, pytest.raises(EngineError) as caught:
        started(fake, 0.1)
    assert caught.value.message.startswith("the stub fake does not answer 'qSupported:multiprocess+")


def test_a_stub_that_goes_away() -> None:
    fake = FakeStub(lambda _: b"")
    fake._connection.close()
    with pytest.raises(EngineError) as caught:
        started(fake)
    fake.transport.close()
    assert caught.value.message == "the stub fake has closed the connection"


def test_objects_are_read_in_pieces() -> None:
    text = bytes(range(256)) * 20

    def answer(payload: bytes) -> bytes:
        if payload.startswith(b"qSupported"):
            return b"qXfer:features:read+;qXfer:memory-map:read-"
        if payload.startswith(b"qXfer:features:read:target.xml:"):
            start, size = (int(number, 16) for number in payload.rpartition(b":")[2].split(b","))
            piece = text[start : start + size]
            return (b"l" if start + size >= len(text) else b"m") + piece
        return b""

    with FakeStub(answer) as fake:
        stub = started(fake)
        assert stub.read_object("features", "target.xml") == text
        assert stub.read_object("features", "other.xml") is None
        assert stub.read_object("memory-map") is None
        assert stub.read_object("auxv") is None


def test_an_object_without_an_end() -> None:
    with FakeStub(script({b"qSupported": b"qXfer:auxv:read+", b"qXfer": b"m"})) as fake:
        stub = started(fake)
        with pytest.raises(EngineError) as caught:
            stub.read_object("auxv")
    assert caught.value.message == "the stub fake does not finish 'auxv'"


def test_threads() -> None:
    answers = {b"qfThreadInfo": b"mp1.2a,p1.2b", b"qsThreadInfo": b"l"}
    with FakeStub(script(answers)) as fake:
        assert started(fake).threads() == [ThreadId(1, 0x2A), ThreadId(1, 0x2B)]
    with FakeStub(script({b"qC": b"QC7"})) as fake:
        assert started(fake).threads() == [ThreadId(0, 7)]
    with FakeStub(script({})) as fake:
        stub = started(fake)
        assert stub.threads() == []
        assert stub.current_thread() is None
        assert fake.asked.count(b"qC") == 1


def test_memory() -> None:
    memory = bytes(range(200))

    def answer(payload: bytes) -> bytes:
        if payload.startswith(b"qSupported"):
            return b"PacketSize=80"
        if payload.startswith(b"m"):
            start, size = (int(number, 16) for number in payload[1:].split(b","))
            return memory[start : start + size].hex().encode() or b"E01"
        return b"OK" if payload.startswith((b"M64,", b"M30,")) else b"E01"

    with FakeStub(answer) as fake:
        stub = started(fake)
        assert stub.read(10, 100) == memory[10:110]
        assert max(int(asked.partition(b",")[2], 16) for asked in fake.asked if asked.startswith(b"m")) == 48
        assert stub.read(190, 20) == memory[190:]
        assert stub.read(5000, 4) == b""
        assert stub.write(0x64, b"\x01\x02")
        assert fake.asked[-1] == b"M64,2:0102"
        assert not stub.write(0x99, b"\x01")
        assert not stub.write(0x30, bytes(60))


@pytest.mark.parametrize(("answer", "problem"), [(b"0g", b"0g"), (b"010203", b"010203")])
def test_memory_that_is_none(answer: bytes, problem: bytes) -> None:
    with FakeStub(script({b"m": answer})) as fake:
        stub = started(fake)
        with pytest.raises(EngineError) as caught:
            stub.read(0, 2)
    assert caught.value.message == f"the stub fake answers 'm' with {problem!r}"


def test_registers() -> None:
    answers = {b"Hg": b"OK", b"g": b"0102xxxx", b"P": b"OK", b"G": b"OK", b"?": b"S05"}
    with FakeStub(script(answers)) as fake:
        stub = started(fake)
        assert stub.read_registers(THREAD) == b"\x01\x02\0\0"
        assert stub.read_registers(THREAD) == b"\x01\x02\0\0"
        assert stub.set_register(THREAD, 16, b"\xff")
        assert stub.set_register(THREAD, 17, b"\xfe")
        assert fake.asked.count(b"Hgp1.2a") == 1
        assert fake.asked[-1] == b"P10=ff"  # the second one waits for the next question
        stub.reason()
        assert fake.asked[-2:] == [b"P11=fe", b"?"]


def test_registers_that_cannot_be_set_one_by_one() -> None:
    with FakeStub(script({b"G": b"OK"})) as fake:
        stub = started(fake)
        assert not stub.set_register(None, 16, b"\xff")
        assert not stub.set_register(None, 16, b"\xff")
        assert [asked for asked in fake.asked if asked.startswith(b"P")] == [b"P10=ff"]


def test_what_was_told_has_to_be_ok() -> None:
    with FakeStub(script({b"z0": b"E22", b"?": b"S05"})) as fake:
        stub = started(fake)
        stub.remove(BreakpointKind.SOFTWARE, 0x1000, 1)
        with pytest.raises(EngineError) as caught:
            stub.reason()
    assert caught.value.message == "the stub fake answers 'z0,1000,1' with b'E22'"


def test_much_is_told_one_by_one_while_packets_are_acknowledged() -> None:
    with FakeStub(script({b"G": b"OK", b"?": b"S05"})) as fake:
        stub = started(fake)
        stub.set_registers(None, bytes(300))
        assert stub.reason() == Stopped(5, None, {})


def test_breakpoints() -> None:
    with FakeStub(script({b"Z0": b"OK", b"Z2": b"E01"})) as fake:
        stub = started(fake)
        assert stub.insert(BreakpointKind.SOFTWARE, 0x1000, 1) is True
        assert fake.asked[-1] == b"Z0,1000,1"
        assert stub.insert(BreakpointKind.WRITE, 0x1000, 8) is False
        assert stub.insert(BreakpointKind.ACCESS, 0x1000, 8) is None
        assert stub.insert(BreakpointKind.ACCESS, 0x2000, 8) is None
        assert fake.asked[-1] == b"Z4,1000,8"
        assert stub.knows_breakpoints


def test_going_on_with_actions() -> None:
    answers = {b"vCont?": b"vCont;c;C;s;S", b"vCont;": b"T05thread:p1.2a;"}
    with FakeStub(script(answers)) as fake:
        stub = started(fake)
        stub.resume([("s", THREAD)])
        assert stub.wait(TIMEOUT) == Stopped(5, THREAD, {})
        stub.resume([("C0b", THREAD), ("c", None)])
        assert stub.wait(TIMEOUT) == Stopped(5, THREAD, {})
        assert fake.asked[-2:] == [b"vCont;s:p1.2a", b"vCont;C0b:p1.2a;c"]


def test_going_on_without_actions() -> None:
    with FakeStub(script({b"Hc": b"OK", b"s": b"S05", b"c": b"W00"})) as fake:
        stub = started(fake)
        stub.resume([("s", THREAD)])
        assert stub.wait(TIMEOUT) == Stopped(5, None, {})
        stub.resume([("c", None)])
        assert stub.wait(TIMEOUT) == Exited(0, None)
        assert fake.asked[-3:] == [b"Hcp1.2a", b"s", b"c"]


def test_waiting_has_an_end_and_an_interrupt_is_no_packet() -> None:
    with FakeStub(lambda payload: None if payload.startswith(b"vCont;") else b"") as fake:
        stub = started(fake)
        stub.resume([("c", None)])
        assert stub.wait(0.05) in (None, NoThreads())
        stub.interrupt()
        fake.send(b"$T02#b6")
        reply = stub.wait(TIMEOUT)
        assert reply in (Stopped(2, None, {}), NoThreads())


def test_letting_go() -> None:
    with FakeStub(script({b"D;1": b"", b"D": b"OK"})) as fake:
        assert started(fake).detach(1)
    with FakeStub(script({})) as fake:
        assert not started(fake).detach(0)


def test_an_answer_that_an_interrupt_has_brought_once_more_is_no_stop() -> None:
    answers = {b"vCont;c": None, b"vCont?": b"vCont;c;C;s;S"}
    with FakeStub(lambda payload: answers.get(payload, b"")) as fake:
        stub = started(fake)
        stub.resume([("c", None)])
        stub.interrupt()
        fake.send(b"$OK#9a$T05#b9")
        assert stub.wait(TIMEOUT) == Stopped(5, None, {})
        fake.send(b"$OK#9a")
        with pytest.raises(EngineError) as caught:
            stub.wait(TIMEOUT)
    assert caught.value.message == "the stub's answer is not a reason for a stop: b'OK'"
