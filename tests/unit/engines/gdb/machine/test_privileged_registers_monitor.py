"""What QEMU's monitor says of system registers and ports, as version 7.2 says it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.gdb.machine.privileged_registers import Monitor, Segment
from dprobes.engines.gdb.remote_protocol import packet
from dprobes.engines.gdb.stub_requests import Stub
from dprobes.errors import EngineError
from support.fake_stub import FakeStub

if TYPE_CHECKING:
    from collections.abc import Iterator

REGISTERS = """\r
CPU#1\r
RAX=0000000000000000 RBX=0000000000000000 RCX=0000000000000000 RDX=0000000000000000\r
CS =0010 0000000000000000 ffffffff 00af9b00 DPL=0 CS64 [-RA]\r
SS =0018 0000000000000000 ffffffff 00cf9300 DPL=0 DS   [-WA]\r
LDT=0000 0000000000000000 00000000 00008200 DPL=0 LDT\r
TR =0040 fffffe30d5589000 00004087 00008900 DPL=0 TSS64-avl\r
GDT=     fffffe30d5587000 0000007f\r
IDT=     fffffe0000000000 00000fff\r
CR0=80050033 CR2=00007f2df22d55e0 CR3=000000001dff0000 CR4=000006f0\r
DR0=0000000000000001 DR1=0000000000000000 DR2=0000000000000000 DR3=0000000000000000 \r
DR6=00000000ffff0ff0 DR7=0000000000000400\r
"""
ANSWERS = {
    "info cpus": "* CPU #0: thread_id=10\r\n  CPU #1: thread_id=10\r\n",
    "cpu 1": "",
    "info registers": REGISTERS,
    "i /b 0x71": "portb[0x0071] = 0x26\r\n",
    "i /w 0x72": "unknown\r\n",
    "o /h 0x80 0x1234": "",
    "o /b 0x90 0x1": "warning: nobody is there\r\nunknown port\r\n",
    'dump-guest-memory "/tmp/x"': "Error: dump: failed to open\r\n",
    'dump-guest-memory "/tmp/y"': "warning: guest note format is unsupported: 0\r\n",
    'dump-guest-memory "/tmp/z"': "",
    'dump-guest-memory "/tmp/w"': "warning: guest note is not present\r\nError: dump: failed to save memory\r\n",
}


@contextmanager
def monitor(*, is_there: bool = True) -> Iterator[Monitor]:
    def answer(payload: bytes) -> bytes | None:
        if not payload.startswith(b"qRcmd,") or not is_there:
            return b""
        said = ANSWERS[bytes.fromhex(payload[6:].decode()).decode()]
        told = [packet(b"O" + line.encode().hex().encode()) for line in said.splitlines(keepends=True)]
        return b"".join((*told, packet(b"OK")))

    with FakeStub(answer) as stub:
        yield Monitor(Stub(stub.transport, 5.0))


def test_system_registers() -> None:
    with monitor() as found:
        assert found.is_there
        system = found.system_registers(1)
    assert system.segments["cs"] == Segment(0x10, 0, 0xFFFFFFFF, 0xAF9B00)
    assert system.segments["tr"].selector == 0x40
    assert system.tables == {"gdt": (0xFFFFFE30D5587000, 0x7F), "idt": (0xFFFFFE0000000000, 0xFFF)}
    assert (system.debug["dr0"], system.debug["dr7"]) == (1, 0x400)


def test_ports() -> None:
    with monitor() as found:
        assert found.read_port(0x71, 1) == 0x26
        found.write_port(0x80, 2, 0x1234)
        with pytest.raises(EngineError) as caught:
            found.read_port(0x72, 4)
    assert caught.value.message == "the monitor behind the stub fake reads no port 0x72: unknown"


def test_a_dump_that_fails() -> None:
    with monitor() as found, pytest.raises(EngineError) as caught:
        found.dump("/tmp/x")
    assert caught.value.message == "the stub fake writes no dump: Error: dump: failed to open"


def test_a_stub_without_a_monitor() -> None:
    with monitor(is_there=False) as found:
        assert not found.is_there
        with pytest.raises(EngineError) as caught:
            found.read_port(0x71, 1)
    assert caught.value.message == "the stub fake has no monitor, which 'i /b 0x71' is for"


def test_a_warning_does_not_mean_that_nothing_was_done() -> None:
    with monitor() as found:
        assert found.dump("/tmp/y") == "warning: guest note format is unsupported: 0"
        assert found.dump("/tmp/z") == ""
        with pytest.raises(EngineError) as dumped:
            found.dump("/tmp/w")
        with pytest.raises(EngineError) as written:
            found.write_port(0x90, 1, 1)
    assert dumped.value.message == "the stub fake writes no dump: Error: dump: failed to save memory"
    assert written.value.message == "the monitor behind the stub fake writes no port 0x90: unknown port"
